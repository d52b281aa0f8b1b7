// The last lines of what a process of the fleet has written.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { ask, errorOf } from "./stream.js";

const SECONDS = 2;

async function linesOf(part) {
  const response = await ask(`ui/logs?part=${encodeURIComponent(part)}`);
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}

export function Logs() {
  const [open, setOpen] = useState(false);
  const [part, setPart] = useState("");
  const [said, setSaid] = useState({ parts: [], lines: [] });
  const [trouble, setTrouble] = useState("");
  useEffect(() => {
    if (!open) return undefined;
    let gone = false;
    const look = () => linesOf(part).then(
      (answer) => gone || (setSaid(answer), setTrouble("")),
      (error) => gone || setTrouble(error.message),
    );
    look();
    const again = setInterval(look, 1000 * SECONDS);
    return () => {
      gone = true;
      clearInterval(again);
    };
  }, [open, part]);
  const box = useRef(null);
  const atEnd = useRef(true);
  // New lines come at the end; whoever has scrolled up to read others stays there.
  useLayoutEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  });
  const scrolled = ({ target }) => {
    atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 8;
  };
  const choose = (event) => {
    atEnd.current = true;
    setPart(event.target.value);
  };
  return html`<section class="card logs">
    <details ontoggle=${(event) => setOpen(event.target.open)}>
      <summary><h2>Logs</h2><span class="dim">of processes on the gateway's machine</span></summary>
      <select aria-label="Log" value=${part} onchange=${choose}>
        <option value="">choose a process</option>
        ${said.parts.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
      ${trouble && html`<span class="bad">${trouble}</span>`}
      ${part && html`<pre class="log" ref=${box} onscroll=${scrolled}>${said.part === part ? said.lines.join("\n") || "(empty)" : ""}</pre>`}
    </details>
  </section>`;
}
