// The fleet at present: one frame per second, drawn.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { colour } from "./colours.js";
import { KeyForm } from "./key.js";
import { Logs } from "./logs.js";
import { change, follow, key, wake } from "./stream.js";
import { Timeline } from "./timeline.js";

const JOBS_SECONDS = 32;
const RATES = 90;

// What the frames of the last half minute add up to.
const fleet = { frame: null, offset: 0, jobs: new Map(), moves: new Map(), tokens: new Map(), rates: new Map() };
const clock = () => Date.now() / 1000 + fleet.offset;

function take(frame, first) {
  if (first) {
    fleet.jobs.clear();
    fleet.moves.clear();
  }
  const seconds = fleet.frame ? frame.time - fleet.frame.time : 0;
  fleet.offset = frame.time - Date.now() / 1000;
  fleet.frame = frame;
  for (const [unit, id, model, phase, share, start, end, steps, tokens] of frame.jobs) {
    if (!fleet.jobs.has(unit)) fleet.jobs.set(unit, new Map());
    fleet.jobs.get(unit).set(id, { model, phase, share, start, end, steps, tokens });
  }
  for (const [unit, at, model, destination, stood] of frame.moves) {
    if (!fleet.moves.has(unit)) fleet.moves.set(unit, []);
    fleet.moves.get(unit).push({ at, model, destination, stood });
  }
  const served = new Set(frame.models.map((model) => model.name));
  for (const jobs of fleet.jobs.values()) {
    for (const [id, job] of jobs) if (job.end < frame.time - JOBS_SECONDS || !served.has(job.model)) jobs.delete(id);
  }
  for (const [unit, moves] of fleet.moves) {
    fleet.moves.set(unit, moves.filter((move) => move.at > frame.time - JOBS_SECONDS));
  }
  for (const model of frame.models) {
    const rates = fleet.rates.get(model.name) || [];
    // A unit scheduler that was started anew counts from 0.
    const before = fleet.tokens.get(model.name) ?? model.tokens;
    if (seconds > 0) rates.push(Math.max(0, model.tokens - before) / seconds);
    fleet.tokens.set(model.name, model.tokens);
    fleet.rates.set(model.name, rates.slice(-RATES));
  }
}

const lately = (name) => {
  const last = (fleet.rates.get(name) || []).slice(-5);
  return last.length ? last.reduce((a, b) => a + b, 0) / last.length : 0;
};

export function Fleet() {
  const [, again] = useState(0);
  const [notes, setNotes] = useState([]);
  const [trouble, setTrouble] = useState("");
  const [tries, setTries] = useState(0);
  useEffect(() => {
    const left = new AbortController();
    follow(
      (frame, first) => {
        take(frame, first);
        setTrouble("");
        again((n) => n + 1);
      },
      setTrouble,
      left.signal,
    );
    return () => left.abort();
  }, [tries]);
  if (trouble === "key") return html`<${KeyForm} tried=${key.get()} onKey=${() => setTries((n) => n + 1) || setTrouble("")} />`;
  const { frame } = fleet;
  if (!frame) return html`<p class="dim">${trouble || "asking the fleet"}</p>`;
  const names = frame.models.map((model) => model.name);
  // Whoever may see this with a key may change the fleet; without keys nobody may over HTTP.
  const act = key.get() && ((words, doing) => {
    const note = { words: `${words} …`, tone: "dim" };
    setNotes((all) => [...all.slice(-3), note]);
    const end = (said, tone) => setNotes((all) => all.map((each) => (each === note ? { words: said, tone } : each)));
    doing().then((said) => end(said, "good"), (error) => end(`${words}: ${error.message}`, "bad"));
  });
  return html`<${Headline} frame=${frame} />
    ${notes.map((note, n) => html`<div key=${n} class="banner ${note.tone}" role="status">${note.words}
      <button class="plain" aria-label="Close" onclick=${() => setNotes(notes.filter((each) => each !== note))}>×</button></div>`)}
    ${trouble && html`<div class="banner warn" role="status">${trouble}</div>`}
    <div class="layout">
      <${Models} models=${frame.models} names=${names} act=${act} />
      ${frame.units.map((unit) => html`<${Unit} key=${unit.name} unit=${unit} models=${frame.models} names=${names} act=${act} />`)}
      <${Logs} />
    </div>`;
}

function Headline({ frame }) {
  const sum = (of) => frame.models.reduce((all, model) => all + of(model), 0);
  const count = (status) => frame.models.filter((model) => model.status === status).length;
  const asleep = count("asleep");
  const tone = { ok: "good", degraded: "warn", starting: "warn" }[frame.status] || "bad";
  const figures = [
    [`${count("up")} of ${frame.models.length}`, asleep ? `models up, ${asleep} asleep` : "models up"],
    [`${frame.units.filter((unit) => unit.status === "up").length} of ${frame.units.length}`, "units up"],
    [sum((model) => model.running), "in service"],
    [sum((model) => model.waiting + model.queued), "waiting"],
    [whole(sum((model) => lately(model.name))), "tokens/s"],
  ];
  return html`<div class="figures">
    <span class="pill ${tone}">${frame.status}</span>
    ${figures.map(([value, of]) => html`<span><b style=${{ color: "var(--text)" }}>${value}</b> ${of}</span>`)}
  </div>`;
}

const TONES = { up: "good", asleep: "dim", degraded: "bad" };

// Each figure has its column's name beside it where the window is too narrow for columns.
function Models({ models, names, act }) {
  const replicas = models.some((model) => model.bounds);
  return html`<section class="card">
    <div class="head"><h2>Models</h2><span class="dim">latencies of requests that ended in the last minute${act ? "" : "; changes need a key"}</span></div>
    <table>
      <thead><tr>
        <th>model</th><th class="words">state</th><th class="words rest">on</th><th>in service</th><th>waiting</th>
        <th class="more">tokens/s</th><th class="rest"></th><th class="rest">TTFT p50</th><th>TTFT p95 <span class="more">/ SLO</span></th>
        <th class="rest">TPOT p50</th><th>TPOT p95 <span class="more">/ SLO</span></th>
        <th>SLO met</th>${act && html`<th>${replicas ? "replicas" : "change"}</th>`}
      </tr></thead>
      <tbody>${models.map((model) => html`<tr key=${model.name} data-model=${model.name}>
        <td title=${model.name}><i class="swatch" style=${{ background: colour(names, model.name) }} />${model.name}</td>
        <td class="words"><span class="pill ${TONES[model.status] || "warn"}" title=${model.reason}>${model.status}</span></td>
        <td class="words rest" title=${model.replicas.join(", ")}>${model.replicas.join(", ") || "–"}</td>
        <td data-of="in service">${model.running}</td>
        <td data-of="waiting" class=${model.waiting + model.queued ? "warn" : ""}>${model.waiting + model.queued}</td>
        <td class="more">${whole(lately(model.name))}</td>
        <td class="rest"><${Spark} values=${fleet.rates.get(model.name) || []} colour=${colour(names, model.name)} /></td>
        <td class="rest">${model.ttft ? time(model.ttft.p50) : "–"}</td>
        <td data-of="TTFT p95"><${Against} spread=${model.ttft} limit=${model.slo_ttft} /></td>
        <td class="rest">${model.tpot ? time(model.tpot.p50) : "–"}</td>
        <td data-of="TPOT p95"><${Against} spread=${model.tpot} limit=${model.slo_tpot} /></td>
        <td data-of="SLO met" class=${model.met === null ? "dim" : model.met < 0.9 ? "bad" : model.met < 0.99 ? "warn" : "good"}>
          ${model.met === null ? "–" : html`${percent(model.met)} <span class="more">of ${model.requests}</span>`}</td>
        ${act && html`<td data-of=${model.bounds ? "replicas" : ""}><${ModelActions} model=${model} others=${models.length > 1} act=${act} /></td>`}
      </tr>`)}</tbody>
    </table>
  </section>`;
}

// What the fleet would refuse is not offered: where memory decides nobody sets numbers of replicas, and a fleet keeps
// one model.
function ModelActions({ model, others, act }) {
  const { name, bounds } = model;
  const count = model.replicas.length;
  const scale = (replicas) => act(`${name}: to ${replicas} replicas`, () => change("scale", { model: name, replicas }));
  const remove = () => confirm(`Serve ${name} no longer? Requests that run are finished.`) &&
    act(`removing ${name}`, () => change("remove", { model: name }));
  return html`<span class="actions">
    ${model.status === "asleep" && html`<button onclick=${() => act(`waking ${name}`, () => wake(name))}>wake</button>`}
    ${bounds && html`
      <button title="one replica less" disabled=${count <= bounds[0]} onclick=${() => scale(count - 1)}>−</button>
      <b>${count}</b>
      <button title="one replica more" disabled=${bounds[1] !== null && count >= bounds[1]} onclick=${() => scale(count + 1)}>+</button>`}
    ${others && html`<button title="remove the model" onclick=${remove}>×</button>`}
  </span>`;
}

// A 95th percentile, and how much of the objective it takes.
function Against({ spread, limit }) {
  if (!spread) return html`<span class="dim">–</span>`;
  if (!limit) return html`${time(spread.p95)}`;
  const part = spread.p95 / limit;
  const tone = part > 1 ? "bad" : part > 0.8 ? "warn" : "good";
  return html`<span class=${part > 0.8 ? tone : ""}>${time(spread.p95)}</span> <span class="dim more">/ ${time(limit)}</span><span class="meter ${tone}"><i style=${{ width: `${Math.min(100, 100 * part)}%` }} /></span>`;
}

function Spark({ values, colour: tint }) {
  const most = Math.max(1, ...values);
  const points = values.map((value, n) => `${((n + RATES - values.length) * 60) / (RATES - 1)},${21 - (19 * value) / most}`);
  return html`<svg width="60" height="22" aria-hidden="true">
    <polyline points=${points.join(" ")} fill="none" stroke=${tint} stroke-width="1.5" />
  </svg>`;
}

function Unit({ unit, models, names, act }) {
  const drain = () => confirm(`Empty unit ${unit.name} and end it? Its requests move, or are finished.`) &&
    act(`draining ${unit.name}`, () => change("drain", { unit: unit.name }));
  // Models that have no other replica, and must have one, would be left without; where memory decides, units stay.
  const drains = models.every(({ name, bounds, replicas }) =>
    bounds && (!unit.serves.includes(name) || replicas.length > 1 || bounds[0] === 0));
  const about = [unit.policy, unit.remote && "on another machine", `${percent(unit.share_used)} of its compute leased`];
  return html`<section class="card" data-unit=${unit.name}>
    <div class="head">
      <h2>Unit ${unit.name}</h2>
      <span class="pill ${unit.status === "up" ? "good" : "bad"}">${unit.status}</span>
      <span class="dim">${about.filter(Boolean).join(", ")}</span>
      ${unit.draining.length > 0 && html`<span class="warn">draining: ${unit.draining.join(", ")}</span>`}
      ${act && drains && html`<button class="end" onclick=${drain}>drain</button>`}
    </div>
    <div class="unit">
      <div>${unit.pools.map((pool) => html`<${Pool} key=${pool.name} pool=${pool} names=${names} />`)}</div>
      <div>
        <h3>Prefill and decode jobs; a job is as high as its share of the unit</h3>
        <${Timeline} unit=${unit} models=${names} shapes=${new Map(models.map((model) => [model.name, model.shape]))} jobs=${fleet.jobs.get(unit.name) || new Map()}
          moves=${fleet.moves.get(unit.name) || []} clock=${clock} />
      </div>
    </div>
  </section>`;
}

function Pool({ pool, names }) {
  const wide = (pages) => `${(100 * pages) / Math.max(1, pool.pages)}%`;
  const used = pool.pages - pool.free;
  return html`<h3>KV pool ${pool.name}: ${whole(used)} of ${whole(pool.pages)} pages (${bytes(used * pool.page_bytes)} of ${bytes(pool.pages * pool.page_bytes)})</h3>
    <div class="stack">${pool.models.map(
      (part) => html`<i style=${{ width: wide(part.used), background: colour(names, part.model) }} />
        <i class="cached" style=${{ width: wide(part.cached), background: colour(names, part.model) }} />`,
    )}</div>
    ${pool.models.map(
      (part) => html`<div class="part" key=${part.model} title="${part.model}: ${part.used} used, ${part.cached} cached, quota ${part.quota} pages">
        <span><i class="swatch" style=${{ background: colour(names, part.model) }} />${part.model}</span>
        <div class="bar">
          <i style=${{ left: 0, width: wide(part.used), background: colour(names, part.model) }} />
          <i class="cached" style=${{ left: wide(part.used), width: wide(part.cached), background: colour(names, part.model) }} />
          <b style=${{ left: wide(Math.min(part.quota, pool.pages)) }} />
        </div>
        <span>${whole(part.used)} / ${whole(part.quota)}</span>
      </div>`,
    )}
    <div class="key">full: in use, pale: cached prefixes<b />quota; at the right: in use / quota</div>`;
}

function time(seconds) {
  if (seconds >= 10) return `${seconds.toFixed(0)} s`;
  if (seconds >= 1) return `${seconds.toFixed(1)} s`;
  return `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
}

const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 1 && share > 0.99 ? 1 : 0)} %`;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let n = 0;
  for (; count >= 1024 && n < units.length - 1; n += 1) count /= 1024;
  return `${count.toFixed(count < 10 && n ? 1 : 0)} ${units[n]}`;
}
