// Probabilities as people read them: in percent, in five levels, as a bar.

import { element } from "./dom.js";

const FLOORS = [0.15, 0.4, 0.7, 0.9];

/** The probability of a log-probability; null where there is none. */
export const probability = (logprob) => (logprob === null ? null : Math.exp(logprob));

/** 0 (unlikely) to 4 (nearly certain). */
export const level = (p) => FLOORS.filter((floor) => p >= floor).length;

/** `92 %`, `0.3 %`, `<0.1 %`. */
export function percent(p) {
  if (p === null) return "–";
  const hundredths = 100 * p;
  if (hundredths < 0.1) return "<0.1 %";
  return `${hundredths < 9.95 ? hundredths.toFixed(1) : hundredths.toFixed(0)} %`;
}

/** A bar as long as it is likely. Its colour says the same again. */
export function bar(p) {
  const fill = element("span", { class: `fill level-${level(p ?? 0)}` });
  fill.style.width = `${100 * (p ?? 0)}%`;
  return element("span", { class: "bar", "aria-hidden": "true" }, fill);
}
