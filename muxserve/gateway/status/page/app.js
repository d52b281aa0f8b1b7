// The page: one view at a time, chosen by what stands behind the address's #.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { Chat } from "./chat.js";
import { applyTheme, toggleTheme } from "./colours.js";
import { Fleet } from "./fleet.js";
import { Usage } from "./usage.js";

// A view more is a line more.
const VIEWS = [
  { name: "fleet", title: "Fleet", View: Fleet },
  { name: "chat", title: "Chat", View: Chat },
  { name: "usage", title: "Usage", View: Usage },
];

const chosen = () => VIEWS.find(({ name }) => location.hash === `#${name}`) || VIEWS[0];

function App() {
  const [shown, show] = useState(chosen());
  useEffect(() => {
    const turn = () => show(chosen());
    addEventListener("hashchange", turn);
    return () => removeEventListener("hashchange", turn);
  }, []);
  return html`<main>
    <header>
      <h1><img src="ui/icon.svg" alt="" />MuxServe</h1>
      <nav>${VIEWS.map(({ name, title }) => html`<a key=${name} href="#${name}"
        aria-current=${shown.name === name ? "page" : undefined}>${title}</a>`)}</nav>
      <button class="plain" onclick=${toggleTheme} title="Light or dark">light / dark</button>
    </header>
    <${shown.View} />
  </main>`;
}

applyTheme();
render(html`<${App} />`, document.body);
