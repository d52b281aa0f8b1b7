// Asks for an API key.

import { html, useState } from "./vendor/htm-preact.js";
import { key } from "./stream.js";

export function KeyForm({ tried, onKey }) {
  const [value, setValue] = useState("");
  const enter = (event) => {
    event.preventDefault();
    key.set(value);
    onKey();
  };
  return html`<div class="card login">
    <div class=${tried ? "bad" : "dim"}>${tried ? "This key does not open the page." : "This fleet wants a key."}</div>
    <form onsubmit=${enter}>
      <input type="password" aria-label="Key" placeholder="API key" value=${value} oninput=${(e) => setValue(e.target.value)} />
      <button class="main">Open</button>
    </form>
    <div class="dim">It is kept in this tab until it is closed. The fleet's view wants an admin's key, the others any.</div>
  </div>`;
}
