// Keeps the overview up to date while the page is visible: polls the node every pollMs, and not while the page is hidden.
// All overviews poll at the same moments, the multiples of pollMs: the node computes one response for all of them, and
// ten requests at once cost it less than ten spread over time.

import { Chart, formats } from "./chart.js";
import { morph } from "./morph.js";

const SAMPLES_MAX = 300;
const GAP_S = 15;
const ANSWER_MS_MAX = 10_000;
const REST_MS_MAX = 20_000;

const live = document.getElementById("live");
const stale = document.getElementById("stale");
const pollMs = Number(live.dataset.pollMs);

let samples = [];
let names = {}; // display names of slaves, by their identity in samples
let failures = 0;
let lastAnswer = new Date();
let timer = 0;
let isAsking = false;

const charts = new Map(
  [...live.querySelectorAll("[data-chart]")].map((figure) => {
    const kind = figure.dataset.chart;
    return [kind, new Chart(figure, kind === "messages" ? formats.number : formats.size)];
  }),
);

async function ask(address) {
  const answer = await fetch(address, { redirect: "manual", cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS_MAX) });
  if (answer.type === "opaqueredirect") {
    location.assign(`${live.dataset.login}?next=${encodeURIComponent(location.pathname)}`);
    return null; // the session is over
  }
  if (!answer.ok) throw new Error(`answers ${answer.status}`);
  return answer.json();
}

async function look() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  try {
    const answer = await ask(live.dataset.address);
    if (answer === null) return;
    if (answer.role !== live.dataset.role) return location.reload();
    const page = new DOMParser().parseFromString(`<div>${answer.html}</div>`, "text/html").body.firstChild;
    for (const { name, value } of live.attributes) page.setAttribute(name, value);
    morph(live, page);
    names = answer.names;
    note(answer.sample);
    failures = 0;
    lastAnswer = new Date();
    stale.hidden = true;
  } catch (error) {
    console.warn(error);
    failures += 1;
    // A single failure may be a connection that was closed just then.
    if (failures > 1 && stale.hidden) {
      stale.textContent = `This node has not responded since ${lastAnswer.toISOString().slice(11, 19)} UTC. The data below is from that time.`;
      stale.hidden = false;
    }
  } finally {
    isAsking = false;
  }
  if (!document.hidden) {
    timer = setTimeout(look, failures > 1 ? backOffMs() : untilTogetherMs());
  }
}

// Time until the next common moment that is at least half a pollMs away.
function untilTogetherMs() {
  return 1.5 * pollMs - ((Date.now() + pollMs / 2) % pollMs);
}

function backOffMs() {
  return Math.min(REST_MS_MAX, pollMs * 2 ** (failures - 1)) * (0.9 + 0.2 * Math.random());
}

function note(sample) {
  const last = samples.at(-1);
  if (last?.time_s === sample.time_s) return draw();
  // Begins again if the log was truncated or replaced, or the node was restarted, and its clock with it.
  if (last && (last.log_end > sample.log_end || last.time_s > sample.time_s)) samples = [];
  samples = [...samples.slice(1 - SAMPLES_MAX), sample];
  draw();
}

function draw() {
  if (!samples.length) return;
  const now = samples.at(-1).time_s;
  charts.get("messages").show(
    new Map([
      ...(live.dataset.role === "SLAVE" ? [] : [["stored", rates((sample) => sample.stored_count)]]),
      ["read", rates((sample) => sample.read_count)],
    ]),
    now,
  );
  charts.get("log").show(new Map([["written", rates((sample) => sample.log_end)]]), now);
  const slaves = Map.groupBy([...new Set(samples.flatMap((sample) => Object.keys(sample.behind)))], (id) => names[id] ?? id);
  charts.get("behind")?.show(
    new Map(
      [...slaves.keys()].sort().map((name) => [
        name,
        samples.map(({ at, time_s, behind }) => ({ at, time_s, value: slaves.get(name).map((id) => behind[id]).find((bytes) => bytes !== undefined) ?? null })),
      ]),
    ),
    now,
  );
}

function rates(read) {
  return samples.map((sample, index) => {
    const before = samples[index - 1];
    const seconds = before ? sample.time_s - before.time_s : 0;
    const isKnown = seconds > 0 && seconds < GAP_S && read(sample) >= read(before);
    return { at: sample.at, time_s: sample.time_s, value: isKnown ? (read(sample) - read(before)) / seconds : null };
  });
}

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  if (!document.hidden) look();
});

try {
  samples = (await ask(live.dataset.history)) ?? [];
  draw();
} catch (error) {
  console.warn(error); // the next poll reports the error
}
look();
