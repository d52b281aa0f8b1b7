// What tenants and keys have used, what is left of budgets, and the keys that were made.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { KeyForm } from "./key.js";
import { ask, errorOf, headers, key } from "./stream.js";

const SECONDS = 10;
const AMOUNTS = ["requests", "prompt_tokens", "cached_tokens", "output_tokens"];
const EXPIRIES = [["", "no end"], ["86400", "1 day"], ["2592000", "30 days"], ["31536000", "1 year"]];

const isoDay = (date) => date.toISOString().slice(0, 10);
const daysAgo = (days) => isoDay(new Date(Date.now() - days * 86400000));
// What can be chosen: its name, and the first day (UTC).
const PERIODS = {
  month: ["this month", () => `${isoDay(new Date()).slice(0, 8)}01`],
  today: ["today", () => daysAgo(0)],
  week: ["7 days", () => daysAgo(6)],
  quarter: ["90 days", () => daysAgo(89)],
};

async function answerOf(path, order) {
  const response = await ask(path, order);
  if (response.status === 401) throw new Error("key");
  if (response.status === 403) return null;
  if (!response.ok) throw new Error(await errorOf(response));
  return response.json();
}

export function Usage() {
  const [period, setPeriod] = useState("month");
  const [by, setBy] = useState("model");
  const [said, setSaid] = useState(null);
  const [keys, setKeys] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [tries, setTries] = useState(0);
  useEffect(() => {
    let gone = false;
    const look = async () => {
      try {
        const found = await answerOf(`admin/usage?since=${PERIODS[period][1]()}&by=${by}`);
        // For admins of fleets that have tenants.
        const made = await answerOf("admin/keys").catch(() => null);
        if (!gone) {
          setSaid({ ...found, by });
          setKeys(made && made.data);
          setTrouble("");
        }
      } catch (error) {
        if (!gone) setTrouble(error.message);
      }
    };
    look();
    const again = setInterval(look, 1000 * SECONDS);
    return () => {
      gone = true;
      clearInterval(again);
    };
  }, [period, by, tries]);
  const again = () => setTries((n) => n + 1);
  if (trouble === "key") return html`<${KeyForm} tried=${key.get()} onKey=${() => again() || setTrouble("")} />`;
  if (!said) return html`<p class="dim">${trouble || "asking the fleet"}</p>`;
  return html`<div class="layout">
    ${trouble && html`<div class="banner warn" role="status">${trouble}</div>`}
    <section class="card">
      <div class="head"><h2>Usage</h2>
        <select aria-label="Period" value=${period} onchange=${(e) => setPeriod(e.target.value)}>
          ${Object.entries(PERIODS).map(([name, [words]]) => html`<option key=${name} value=${name}>${words}</option>`)}
        </select>
        <select aria-label="Rows" value=${by} onchange=${(e) => setBy(e.target.value)}>
          <option value="model">by model</option><option value="key">by key</option>
        </select>
        <span class="dim">days are UTC; requests count when they end</span>
      </div>
      <${Rows} rows=${said.data} by=${said.by} />
      <${Days} rows=${said.data} />
    </section>
    ${said.budgets.length > 0 && html`<${Budgets} budgets=${said.budgets} />`}
    ${keys && html`<${Keys} keys=${keys} onChange=${again} />`}
  </div>`;
}

function Rows({ rows, by }) {
  const names = by === "key" ? ["tenant", "key", "model"] : ["tenant", "model"];
  const sums = new Map();
  for (const row of rows) {
    const of = names.map((name) => row[name]);
    const at = of.join("\n");
    if (!sums.has(at)) sums.set(at, { of, amounts: AMOUNTS.map(() => 0) });
    AMOUNTS.forEach((name, n) => { sums.get(at).amounts[n] += row[name]; });
  }
  if (!sums.size) return html`<p class="dim">Nothing was used. Usage is counted in fleets with tenants.</p>`;
  const tokens = ({ amounts }) => amounts[1] + amounts[3];
  const sorted = [...sums.values()].sort((a, b) => tokens(b) - tokens(a));
  const most = Math.max(1, ...sorted.map(tokens));
  return html`<table>
    <thead><tr>${names.map((name, n) => html`<th class=${n ? "words" : ""}>${name}</th>`)}
      <th>requests</th><th>prompt tokens</th><th class="more">cached</th><th>output tokens</th><th>tokens</th></tr></thead>
    <tbody>${sorted.map((row) => html`<tr key=${row.of.join("\n")} data-tenant=${row.of[0]}>
      ${row.of.map((name, n) => html`<td class=${n ? "words" : ""} data-of=${n ? names[n] : undefined} title=${name}>${name === "-" ? "(no tenant)" : name}</td>`)}
      <td data-of="requests">${whole(row.amounts[0])}</td>
      <td data-of="prompt">${whole(row.amounts[1])}</td>
      <td class="more">${whole(row.amounts[2])}</td>
      <td data-of="output">${whole(row.amounts[3])}</td>
      <td data-of="tokens">${whole(tokens(row))}<span class="meter dim"><i style=${{ width: `${(100 * tokens(row)) / most}%` }} /></span></td>
    </tr>`)}</tbody>
  </table>`;
}

// Tokens by day, as bars.
function Days({ rows }) {
  const days = new Map();
  for (const row of rows) days.set(row.day, (days.get(row.day) || 0) + row.prompt_tokens + row.output_tokens);
  if (days.size < 2) return null;
  const all = [...days].sort();
  const most = Math.max(1, ...days.values());
  return html`<div class="days" role="img" aria-label="Tokens by day">${all.map(([day, tokens]) => html`
    <i key=${day} title="${day}: ${whole(tokens)} tokens" style=${{ height: `${Math.max(2, (60 * tokens) / most)}px` }} />`)}
  </div><div class="key">tokens by day, ${all[0][0]} to ${all[all.length - 1][0]}; most ${whole(most)}</div>`;
}

function Budgets({ budgets }) {
  return html`<section class="card">
    <div class="head"><h2>Budgets</h2><span class="dim">tokens of prompts and answers</span></div>
    <table>
      <thead><tr><th>tenant</th><th class="words">of</th><th class="words">per</th><th>used</th><th>budget</th><th>reset on</th></tr></thead>
      <tbody>${budgets.map((each) => {
        const part = each.used / each.tokens;
        const tone = part >= 1 ? "bad" : part > 0.8 ? "warn" : "good";
        return html`<tr key="${each.tenant} ${each.period} ${each.model}" data-budget=${each.tenant}>
          <td title=${each.tenant}>${each.tenant}</td>
          <td class="words">${each.model || "all models"}</td>
          <td class="words" data-of="per">${each.period}</td>
          <td data-of="used" class=${part > 0.8 ? tone : ""}>${whole(each.used)} <span class="more">(${Math.round(100 * part)} %)</span>
            <span class="meter ${tone}"><i style=${{ width: `${Math.min(100, 100 * part)}%` }} /></span></td>
          <td data-of="budget">${whole(each.tokens)}</td>
          <td data-of="reset on">${day(each.resets_at)}</td>
        </tr>`;
      })}</tbody>
    </table>
  </section>`;
}

function Keys({ keys, onChange }) {
  const [tenant, setTenant] = useState("");
  const [name, setName] = useState("");
  const [expires, setExpires] = useState("");
  const [note, setNote] = useState(null);
  const make = async (event) => {
    event.preventDefault();
    try {
      const made = await answerOf("admin/keys", { tenant, name, expires_in: expires ? Number(expires) : null });
      setNote({ words: `The key of ${made.tenant} is shown this once: `, text: made.key, tone: "good" });
      setName("");
      onChange();
    } catch (error) {
      setNote({ words: error.message, tone: "bad" });
    }
  };
  const revoke = async (each) => {
    if (!confirm(`Revoke ${each.name || each.id} of ${each.tenant}? It opens nothing from then on.`)) return;
    const response = await fetch(`admin/keys/${each.id}`, { method: "DELETE", headers: headers() });
    setNote(response.ok ? { words: `${each.id} is revoked`, tone: "good" } : { words: await errorOf(response), tone: "bad" });
    onChange();
  };
  const tenants = [...new Set(keys.map((each) => each.tenant))];
  return html`<section class="card">
    <div class="head"><h2>Keys</h2><span class="dim">made while the fleet serves; those of the fleet file are not listed</span></div>
    ${note && html`<div class="banner ${note.tone}" role="status"><span>${note.words}${note.text && html`<code>${note.text}</code>`}</span>
      <button class="plain" aria-label="Close" onclick=${() => setNote(null)}>×</button></div>`}
    ${keys.length > 0 && html`<table>
      <thead><tr><th>tenant</th><th class="words">name</th><th class="words more">id</th><th class="words">state</th><th>ends with</th>
        <th class="more">made on</th><th>expires on</th><th>last used</th><th></th></tr></thead>
      <tbody>${keys.map((each) => html`<tr key=${each.id} data-key=${each.id}>
        <td title=${each.tenant}>${each.tenant}</td>
        <td class="words" title=${each.name}>${each.name || "–"}</td>
        <td class="words more">${each.id}</td>
        <td class="words" data-of="state"><span class="pill ${each.status === "active" ? "good" : "dim"}">${each.status}</span></td>
        <td data-of="ends with">${each.hint}</td>
        <td class="more">${day(each.created_at)}</td>
        <td data-of="expires">${each.expires_at ? day(each.expires_at) : "never"}</td>
        <td data-of="last used">${each.last_used_on || "never"}</td>
        <td><span class="actions">${each.status === "active" && html`<button onclick=${() => revoke(each)}>revoke</button>`}</span></td>
      </tr>`)}</tbody>
    </table>`}
    <form class="make" onsubmit=${make}>
      <input aria-label="Tenant" placeholder="tenant" required list="tenants" value=${tenant} oninput=${(e) => setTenant(e.target.value)} />
      <datalist id="tenants">${tenants.map((each) => html`<option key=${each} value=${each} />`)}</datalist>
      <input aria-label="Name of the key" placeholder="what it is for" maxlength="64" value=${name} oninput=${(e) => setName(e.target.value)} />
      <select aria-label="Expires" value=${expires} onchange=${(e) => setExpires(e.target.value)}>
        ${EXPIRIES.map(([seconds, words]) => html`<option key=${seconds} value=${seconds}>${words}</option>`)}
      </select>
      <button class="main">Make a key</button>
    </form>
  </section>`;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const day = (seconds) => isoDay(new Date(1000 * seconds));
