// A question to any model, answered as it comes.

import { html, useRef, useState } from "./vendor/htm-preact.js";
import { errorOf, events, headers } from "./stream.js";

export function Playground({ models }) {
  const [model, setModel] = useState("");
  const [prompt, setPrompt] = useState("");
  const [tokens, setTokens] = useState(128);
  const [heat, setHeat] = useState(0);
  const [answer, setAnswer] = useState("");
  const [note, setNote] = useState("");
  const running = useRef(null);
  const chosen = model && models.includes(model) ? model : models[0];
  const ask = async (event) => {
    event.preventDefault();
    if (running.current || !prompt) return;
    const stop = (running.current = new AbortController());
    setAnswer("");
    setNote("waiting for the first token");
    const began = performance.now();
    let first = 0;
    let pieces = 0;
    let text = "";
    try {
      const response = await fetch("v1/chat/completions", {
        method: "POST",
        signal: stop.signal,
        headers: headers({ "Content-Type": "application/json" }),
        body: JSON.stringify({
          model: chosen, messages: [{ role: "user", content: prompt }], stream: true, max_tokens: Number(tokens),
          temperature: Number(heat), stream_options: { include_usage: true },
        }),
      });
      if (!response.ok) throw new Error(await errorOf(response));
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        const piece = event.choices?.[0]?.delta;
        const added = (piece?.reasoning ?? "") + (piece?.content ?? "");
        if (added) {
          first ||= performance.now();
          text += added;
          setAnswer(text);
        }
        pieces = event.usage?.completion_tokens ?? pieces + (added ? 1 : 0);
        if (first) setNote(figures(began, first, performance.now(), pieces));
      }
      if (!first) setNote("the answer is empty");
    } catch (error) {
      setNote(error.name === "AbortError" ? `${figures(began, first, performance.now(), pieces)}, stopped` : error.message);
    }
    running.current = null;
    setNote((said) => said); // draws the button anew
  };
  return html`<section class="card">
    <div class="head"><h2>Playground</h2><span class="dim">streams from any model</span></div>
    <div class="play">
      <form onsubmit=${ask}>
        <select aria-label="Model" value=${chosen} onchange=${(e) => setModel(e.target.value)}>
          ${models.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select>
        <textarea aria-label="Prompt" placeholder="Ask something" value=${prompt} oninput=${(e) => setPrompt(e.target.value)} />
        <div class="row">
          <label>tokens <input type="number" min="1" max="100000" value=${tokens} oninput=${(e) => setTokens(e.target.value)} /></label>
          <label>temperature <input type="number" min="0" max="2" step="0.1" value=${heat} oninput=${(e) => setHeat(e.target.value)} /></label>
          <button class="main" type="submit" disabled=${!chosen || Boolean(running.current)}>Send</button>
          ${running.current && html`<button type="button" onclick=${() => running.current?.abort()}>Stop</button>`}
        </div>
      </form>
      <div>
        <pre class="answer" aria-live="polite">${answer || html`<span class="dim">The answer comes here.</span>`}</pre>
        <div class="key">${note}</div>
      </div>
    </div>
  </section>`;
}

function figures(began, first, now, tokens) {
  if (!first) return "no token yet";
  const rate = tokens > 1 && now > first ? `, ${((1000 * (tokens - 1)) / (now - first)).toFixed(1)} tokens/s` : "";
  return `first token after ${Math.round(first - began)} ms, ${tokens} tokens${rate}`;
}
