// How busy the server is: /info and /metrics, asked for while the page can be seen.

import { ApiError, get, text } from "./api.js";
import { element, svg } from "./dom.js";

const EVERY = 2000; // milliseconds
const KEPT = 60; // numbers in a line: two minutes
const WINDOW = 30; // samples that latencies are taken from
const LEAST = 12; // samples that a line has room for at first
const SPARK = { width: 120, height: 28 };

/** A panel of figures of one model. */
export class LivePanel {
  /** `onInfo` gets what /info has, each time. */
  constructor(list, note, onInfo) {
    this.note = note;
    this.onInfo = onInfo;
    this.samples = [];
    this.rows = Object.fromEntries(ROWS.map((row) => [row.name, new Row(list, row)]));
    document.addEventListener("visibilitychange", () => document.hidden || this.poll());
  }

  /** Show another model. */
  watch(model) {
    if (model === this.model) return;
    this.model = model;
    this.samples = [];
    for (const row of Object.values(this.rows)) row.values = [];
  }

  /** Ask now, and again as long as the page is seen. */
  async poll() {
    clearTimeout(this.timer);
    if (!document.hidden) {
      await this.sample();
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.poll(), EVERY);
    }
  }

  async sample() {
    try {
      const [info, metrics] = await Promise.all([get("info"), text("metrics")]);
      this.onInfo(info);
      const model = info.models.find(({ name }) => name === this.model);
      if (model?.state === "ready") this.keep(info, model, metrics);
      this.note.textContent = model ? model.state : "";
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      this.note.textContent = error.status === 401 ? "needs an API key" : "no answer";
    }
  }

  keep(info, model, metrics) {
    this.samples.push({ at: performance.now() / 1000, info, model, ...read(metrics, this.model) });
    this.samples = this.samples.slice(-WINDOW);
    for (const { name, value, draws } of ROWS) {
      this.rows[name].show(value(this.samples), draws?.(this.samples));
    }
  }
}

/** One figure, and how it went lately. */
class Row {
  constructor(list, { name, title, help, draws }) {
    this.value = element("dd", { "data-figure": name });
    this.line = svg("polyline", { class: "line" });
    const spark = svg("svg", {
      class: "spark", viewBox: `0 0 ${SPARK.width} ${SPARK.height}`, "aria-hidden": "true",
      preserveAspectRatio: "none",
    }, svg("path", { class: "base", d: `M0 ${SPARK.height - 2}h${SPARK.width}` }), this.line);
    const drawn = draws ? spark : element("span");
    list.append(element("div", { title: help }, element("dt", {}, title), drawn, this.value));
    this.value.textContent = "–";
    this.values = [];
  }

  /** The figure as text and, where it is drawn, as a number. */
  show(text, number) {
    this.value.textContent = text;
    if (number === undefined) return;
    this.values = [...this.values, number].slice(-KEPT);
    const most = Math.max(...this.values) || 1;
    const step = SPARK.width / (Math.max(LEAST, this.values.length) - 1);
    const points = this.values.map((value, i) => {
      const x = SPARK.width - (this.values.length - 1 - i) * step;
      return `${x.toFixed(1)},${(SPARK.height - 2 - (value / most) * (SPARK.height - 4)).toFixed(1)}`;
    });
    this.line.setAttribute("points", points.join(" "));
  }
}

const last = (samples) => samples.at(-1);
const pair = (samples) => [samples.at(-2) ?? samples.at(-1), samples.at(-1)];

/** How much a counter grew since the sample before. */
function growth(samples, name) {
  const [before, now] = pair(samples);
  return (now.sums[name] ?? 0) - (before.sums[name] ?? 0);
}

/** Rows of the steps since the sample before, on average; 0 where there were none. */
function occupancy(samples) {
  const steps = growth(samples, "seqserve_step_rows_count");
  return steps ? growth(samples, "seqserve_step_rows_sum") / steps : 0;
}

function tokensPerSecond(samples) {
  const [before, now] = pair(samples);
  const seconds = now.at - before.at;
  return seconds ? growth(samples, "seqserve_generated_tokens_total") / seconds : 0;
}

/** A quantile of the latencies in the window, in seconds; null without any. */
function latency(samples, q) {
  const now = last(samples).latencies;
  const then = samples[0].latencies;
  return quantile([...now].map(([bound, count]) => [bound, count - (then.get(bound) ?? 0)]), q);
}

/** Of a cumulative histogram `[[bound, count], ...]`, straight within a bucket. */
function quantile(buckets, q) {
  const wanted = q * (buckets.at(-1)?.[1] ?? 0);
  if (!wanted) return null;
  let [low, below] = [0, 0];
  for (const [bound, count] of buckets) {
    if (count >= wanted) {
      return bound === Infinity ? low : low + ((bound - low) * (wanted - below)) / (count - below);
    }
    [low, below] = [bound, count];
  }
  return low;
}

const duration = (seconds) => {
  if (seconds === null) return "–";
  return seconds < 1 ? `${(1000 * seconds).toFixed(0)} ms` : `${seconds.toFixed(1)} s`;
};

const ROWS = [
  {
    name: "queue", title: "Queue", help: "Inputs that wait to begin",
    value: (samples) => `${last(samples).model.waiting} waiting`,
    draws: (samples) => last(samples).model.waiting,
  },
  {
    name: "rows", title: "Batch", help: "Rows per decoder step since the last look, and the most",
    value: (samples) => `${occupancy(samples).toFixed(1)} of ${last(samples).info.limits.max_rows} rows`,
    draws: occupancy,
  },
  {
    name: "tokens", title: "Speed", help: "Generated tokens per second",
    value: (samples) => `${tokensPerSecond(samples).toFixed(0)} tokens/s`,
    draws: tokensPerSecond,
  },
  {
    name: "latency", title: "Latency", help: "Median and 95th percentile of the last minute's requests",
    value: (samples) => `${duration(latency(samples, 0.5))} · ${duration(latency(samples, 0.95))}`,
    draws: (samples) => latency(samples, 0.5) ?? 0,
  },
  {
    name: "cache", title: "Encoder cache", help: "Sources that did not have to be encoded again",
    value: (samples) => {
      const cache = last(samples).model.encoder_cache;
      return cache ? `${cache.hits} of ${cache.hits + cache.misses} hits` : "none";
    },
  },
];

const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;
const LATENCY = "seqserve_request_duration_seconds_bucket";

/** What a model's metrics come to: sums by name, and latencies as `bound -> count`. */
function read(metrics, model) {
  const sums = {};
  const latencies = new Map();
  for (const line of metrics.split("\n")) {
    const [, name, labels = "", number] = LINE.exec(line) ?? [];
    if (!name) continue;
    const given = Object.fromEntries([...labels.matchAll(LABEL)].map(([, k, v]) => [k, JSON.parse(`"${v}"`)]));
    if (given.model !== model) continue;
    const value = Number(number);
    sums[name] = (sums[name] ?? 0) + value;
    if (name === LATENCY) {
      const bound = given.le === "+Inf" ? Infinity : Number(given.le);
      latencies.set(bound, (latencies.get(bound) ?? 0) + value);
    }
  }
  return { sums, latencies };
}
