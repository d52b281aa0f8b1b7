// The jobs of one unit over the last half minute, on a canvas: a lane per model and phase, as high as the job's share.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { colour, theme } from "./colours.js";

const SECONDS = 30;
// Frames come once a second: the right edge is that much behind, so that what is drawn there is known.
const LAG = 1.3;
// Where names of lanes end; narrow windows leave them less.
const leftOf = (width) => (width < 520 ? 104 : 148);
const AXIS = 20;
const PHASES = ["prefill", "decode", "both"];
const SHARE_OF_A_LANE = 0.12;

export function Timeline({ unit, models, shapes, jobs, moves, clock }) {
  const canvas = useRef(null);
  const [tip, setTip] = useState(null);
  const lanes = lanesOf(unit, shapes, jobs.values());
  const laneHeight = lanes.length > 16 ? 13 : 19;
  const height = Math.max(1, lanes.length) * laneHeight + AXIS;
  const drawn = useRef({});
  drawn.current = { lanes, laneHeight, jobs, moves, clock, models };
  useEffect(() => {
    let timer;
    let last = 0;
    const turn = (at) => {
      // Twenty pictures a second are smooth enough, and cost little.
      if (at - last > 50 && canvas.current) {
        last = at;
        draw(canvas.current, drawn.current);
      }
      timer = requestAnimationFrame(turn);
    };
    timer = requestAnimationFrame(turn);
    return () => cancelAnimationFrame(timer);
  }, []);
  const hover = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const lane = lanes[Math.floor((event.clientY - box.top) / laneHeight)];
    const at = timeAt(event.clientX - box.left, box.width, clock());
    const job = lane && [...jobs.values()].find((j) => key(j) === lane.key && j.start <= at && at <= j.end);
    const share = job && `${Math.round(100 * job.share)} % of the unit`;
    setTip(
      job && {
        style: { left: `${Math.min(event.clientX + 12, innerWidth - 230)}px`, top: `${event.clientY + 14}px` },
        text: `${job.model}, ${job.phase}\n${share}, ${Math.round(1000 * (job.end - job.start))} ms\n` +
          `${job.steps} steps, ${job.tokens} tokens`,
      },
    );
  };
  return html`<canvas ref=${canvas} style=${{ height: `${height}px` }} onmousemove=${hover} onmouseleave=${() => setTip(null)}
      role="img" aria-label="Jobs of ${unit.name} over the last 30 seconds" />
    ${tip && html`<div class="tip" style=${tip.style}>${tip.text}</div>`}`;
}

const key = (job) => `${job.model}/${job.phase}`;

// A lane for each model that the unit serves and each phase of it that computes, and for what computed lately.
function lanesOf(unit, shapes, jobs) {
  const phases = new Map(unit.serves.map((model) => [model, new Set()]));
  for (const job of jobs) {
    if (!phases.has(job.model)) phases.set(job.model, new Set());
    phases.get(job.model).add(job.phase);
  }
  const lanes = [];
  for (const [model, seen] of phases) {
    const shown = PHASES.filter((phase) => seen.has(phase));
    (shown.length ? shown : shapes.get(model) === "one" ? ["both"] : ["prefill", "decode"]).forEach((phase, n) => {
      lanes.push({ key: `${model}/${phase}`, model, phase, first: n === 0 });
    });
  }
  return lanes;
}

function timeAt(x, width, now) {
  const left = leftOf(width);
  return now - LAG - SECONDS * (1 - (x - left) / (width - left));
}

function draw(canvas, { lanes, laneHeight, jobs, moves, clock, models }) {
  const scale = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  const { line, text, dim } = theme();
  const now = clock() - LAG;
  const left = leftOf(width);
  const plot = width - left;
  const x = (at) => left + plot * (1 - (now - at) / SECONDS);
  const bottom = height - AXIS;
  pen.font = "11px system-ui, 'DejaVu Sans', sans-serif";
  pen.textBaseline = "middle";
  pen.fillStyle = dim;
  // Marks have room for their words.
  const step = plot < 420 ? 15 : 5;
  for (let ago = SECONDS; ago >= 0; ago -= step) {
    const at = Math.min(x(now - ago), width - 0.5);
    pen.strokeStyle = line;
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, bottom);
    pen.stroke();
    pen.textAlign = ago === 0 ? "right" : ago === SECONDS ? "left" : "center";
    pen.fillText(ago === 0 ? "now" : `${ago} s ago`, at, bottom + AXIS / 2 + 2);
  }
  const row = new Map();
  lanes.forEach((lane, n) => {
    row.set(lane.key, n * laneHeight);
    if (lane.first && n) {
      pen.strokeStyle = line;
      pen.beginPath();
      pen.moveTo(0, n * laneHeight + 0.5);
      pen.lineTo(width, n * laneHeight + 0.5);
      pen.stroke();
    }
    const middle = (n + 0.5) * laneHeight;
    pen.textAlign = "right";
    pen.fillStyle = dim;
    pen.fillText(lane.phase, left - 8, middle);
    if (lane.first) {
      pen.textAlign = "left";
      pen.fillStyle = text;
      pen.fillText(fit(pen, lane.model, left - 52), 0, middle);
    }
  });
  pen.save();
  pen.beginPath();
  pen.rect(left, 0, plot, bottom);
  pen.clip();
  for (const job of jobs.values()) {
    const top = row.get(key(job));
    if (top === undefined || job.end < now - SECONDS) continue;
    const high = (laneHeight - 3) * Math.max(SHARE_OF_A_LANE, Math.min(1, job.share));
    const from = x(job.start);
    pen.fillStyle = colour(models, job.model);
    // Jobs that follow one another stay apart where there is room for that.
    pen.fillRect(from, top + laneHeight - 1 - high, Math.max(1, x(job.end) - from - 0.6), high);
  }
  for (const move of moves) {
    const at = x(move.at);
    if (at < left) continue;
    pen.strokeStyle = pen.fillStyle = text;
    pen.setLineDash([3, 3]);
    pen.beginPath();
    pen.moveTo(at, 0);
    pen.lineTo(at, bottom);
    pen.stroke();
    pen.setLineDash([]);
    pen.textAlign = at > width - 60 ? "right" : "left";
    pen.fillText(`→ ${move.destination}`, at + (at > width - 60 ? -4 : 4), 7);
  }
  pen.restore();
}

function fit(pen, words, width) {
  if (pen.measureText(words).width <= width) return words;
  let cut = words;
  while (cut && pen.measureText(`${cut}…`).width > width) cut = cut.slice(0, -1);
  return `${cut}…`;
}
