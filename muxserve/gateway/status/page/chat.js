// A chat with any model, answered as it comes. It needs a key that may use the models, not an admin's.

import { html, useEffect, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";
import { KeyForm } from "./key.js";
import { ask, errorOf, events, key } from "./stream.js";

// A tokenizer without a chat template: the model continues plain text.
const NO_TEMPLATE = /chat template/i;
// The conversation, also while another view is shown.
let kept = [];

export function Chat() {
  const [models, setModels] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [, looked] = useState(0);
  const [wanted, setWanted] = useState("");
  const [options, setOptions] = useState({ system: "", tokens: 512, heat: 0.7 });
  const [said, draw] = useState(kept);
  const setSaid = (turns) => draw((kept = turns));
  const [draft, setDraft] = useState("");
  const running = useRef(null);
  const look = async () => {
    try {
      const response = await ask("v1/models");
      if (response.status === 401 || response.status === 403) return setTrouble("key");
      if (!response.ok) throw new Error(await errorOf(response));
      setModels((await response.json()).data.map((card) => card.id));
      return setTrouble("");
    } catch (error) {
      return setTrouble(`no connection to the fleet (${error.message})`);
    } finally {
      looked((n) => n + 1); // another wrong key is no other trouble
    }
  };
  useEffect(() => {
    look();
    return () => running.current?.abort();
  }, []);
  const box = useRef(null);
  const atEnd = useRef(true);
  useLayoutEffect(() => {
    if (box.current && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  });
  if (trouble === "key") return html`<${KeyForm} tried=${key.get()} onKey=${look} />`;
  if (!models) {
    return html`<section class="card"><p class="dim">${trouble || "asking the fleet for its models"}</p>
      ${trouble && html`<button onclick=${look}>Try again</button>`}</section>`;
  }
  const model = models.includes(wanted) ? wanted : models[0];
  const answer = async (turns) => {
    const stop = (running.current = new AbortController());
    const reply = { role: "assistant", content: "", reasoning: "", model, note: "waiting for the first token" };
    const show = (more) => {
      Object.assign(reply, more);
      setSaid([...turns, { ...reply }]);
    };
    show({});
    await stream(model, turns, options, stop.signal, show);
    running.current = null;
    show({});
  };
  const send = (event) => {
    event.preventDefault();
    if (running.current || !draft.trim() || !model) return;
    atEnd.current = true;
    setDraft("");
    answer([...said, { role: "user", content: draft }]);
  };
  const again = () => answer(said.slice(0, -1));
  // Enter sends, as in every chat; Shift+Enter begins a line, and Enter that chooses a word of an input method does not.
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  const set = (name) => (event) => setOptions({ ...options, [name]: event.target.value });
  const last = said[said.length - 1];
  return html`<section class="card chat">
    <div class="head">
      <select aria-label="Model" value=${model} onchange=${(e) => setWanted(e.target.value)}>
        ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
      </select>
      <details class="options"><summary>options</summary><div class="row">
        <label>tokens at most <input type="number" min="1" max="100000" value=${options.tokens} oninput=${set("tokens")} /></label>
        <label>temperature <input type="number" min="0" max="2" step="0.1" value=${options.heat} oninput=${set("heat")} /></label>
        <label class="wide">system prompt <input type="text" value=${options.system} oninput=${set("system")} /></label>
        ${key.get() && html`<button type="button" onclick=${() => { key.set(""); look(); }}>forget the key</button>`}
      </div></details>
      <button class="end" disabled=${Boolean(running.current) || !said.length} onclick=${() => setSaid([])}>New chat</button>
    </div>
    ${trouble && html`<div class="banner warn" role="status">${trouble}</div>`}
    <div class="talk" ref=${box} aria-live="polite" onscroll=${({ target }) => {
      atEnd.current = target.scrollHeight - target.scrollTop - target.clientHeight < 8;
    }}>
      ${!said.length && html`<p class="dim">Ask ${model || "a model"} something. The conversation stays in this tab.</p>`}
      ${said.map((turn, n) => html`<${Turn} key=${n} turn=${turn} />`)}
    </div>
    <form class="compose" onsubmit=${send}>
      <textarea aria-label="Message" placeholder="Message" rows="2" value=${draft} onkeydown=${typed}
        oninput=${(e) => setDraft(e.target.value)} />
      ${running.current
        ? html`<button type="button" onclick=${() => running.current?.abort()}>Stop</button>`
        : html`<button class="main" type="submit" disabled=${!model || !draft.trim()}>Send</button>`}
      ${!running.current && last?.role === "assistant" && html`<button type="button" onclick=${again}>Again</button>`}
    </form>
  </section>`;
}

function Turn({ turn }) {
  return html`<div class="turn ${turn.role}">
    ${turn.model && html`<div class="dim">${turn.model}</div>`}
    ${turn.reasoning && html`<details class="dim" open=${!turn.content}><summary>reasoning</summary><div class="text">${turn.reasoning}</div></details>`}
    <div class="text">${turn.content}</div>
    ${turn.error && html`<div class="bad">${turn.error}</div>`}
    ${turn.note && html`<div class="dim note">${turn.note}</div>`}
  </div>`;
}

// Asks for the answer to `turns` and has it shown as it grows, up to its end or the reason why there is none.
async function stream(model, turns, options, signal, show) {
  const began = performance.now();
  let first = 0;
  let tokens = 0;
  let plain = "";
  const note = (ending = "") => (first ? `${figures(began, first, performance.now(), tokens)}${ending}${plain}` : `no token yet${ending}`);
  try {
    let response = await ask("v1/chat/completions", chatOrder(model, turns, options), signal);
    if (response.status === 400) {
      const why = await errorOf(response);
      if (!NO_TEMPLATE.test(why)) throw new Error(why);
      plain = ", as plain text (the model has no chat template)";
      response = await ask("v1/completions", { ...order(model, options), prompt: turns[turns.length - 1].content }, signal);
    }
    if (!response.ok) throw new Error(await errorOf(response));
    let content = "";
    let reasoning = "";
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const choice = event.choices?.[0];
      const more = choice?.delta?.content ?? choice?.text ?? "";
      const thought = choice?.delta?.reasoning ?? choice?.delta?.reasoning_content ?? "";
      if (more || thought) first ||= performance.now();
      content += more;
      reasoning += thought;
      tokens = event.usage?.completion_tokens ?? tokens + (more || thought ? 1 : 0);
      if (first) show({ content, reasoning, note: note() });
    }
    show({ note: first ? note() : "the answer is empty" });
  } catch (error) {
    show(error.name === "AbortError" ? { note: note(", stopped") } : { error: error.message, note: "" });
  }
}

const order = (model, { tokens, heat }) => ({
  model, stream: true, max_tokens: Number(tokens), temperature: Number(heat), stream_options: { include_usage: true },
});

function chatOrder(model, turns, options) {
  const messages = turns.filter((turn) => turn.content).map(({ role, content }) => ({ role, content }));
  if (options.system) messages.unshift({ role: "system", content: options.system });
  return { ...order(model, options), messages };
}

function figures(began, first, now, tokens) {
  const rate = tokens > 1 && now > first ? `, ${((1000 * (tokens - 1)) / (now - first)).toFixed(1)} tokens/s` : "";
  return `first token after ${Math.round(first - began)} ms, ${tokens} tokens${rate}`;
}
