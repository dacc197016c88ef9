// All hypotheses of a beam search as a tree, those dropped on the way too: what they share is drawn once.

import { element } from "./dom.js";
import { label } from "./tokens.js";
import { bar, percent, probability } from "./probability.js";

const ENDED = { eos_token: "ended", stop_sequence: "stopped", length: "cut at the length limit" };

/** A beam search of its own, drawn; `onSearch(width)` gives its sequences, `onPick` takes one. */
export class BeamView {
  constructor(container, { onSearch, onPick }) {
    this.request = null; // whose hypotheses are drawn
    this.sequences = [];
    this.onPick = onPick;
    this.width = element("input", { type: "number", id: "width", min: 2, max: 64, value: 5 });
    this.tree = element("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Tree of hypotheses" });
    this.all = element("input", { type: "checkbox", id: "all-beams", checked: true, change: () => this.shorten() });
    this.note = element("p", { class: "hint", role: "status" });
    const form = element("form", {
      class: "actions",
      submit: (event) => { event.preventDefault(); onSearch(this.width.valueAsNumber); },
    }, element("label", { for: "width" }, "Beams"), this.width,
    element("button", { type: "submit" }, "Search"),
    element("label", {}, this.all, " dropped ones too"));
    container.append(form, this.note, this.tree);
    this.clear();
  }

  clear() {
    this.request = null;
    this.tree.replaceChildren();
    this.note.textContent = "A beam search follows several hypotheses side by side.";
  }

  begin(request) {
    this.clear();
    this.request = request;
    this.note.textContent = "Searching …";
  }

  /** The widest search that the server takes. */
  set limit(width) {
    this.width.max = width;
  }

  /** Draw an answer: its sequences, best first, and the steps that led to them. */
  show({ sequences, steps }) {
    this.sequences = sequences.map((sequence) => withCandidates(sequence));
    const root = grown(steps);
    sequences.forEach((sequence, i) => { endOf(root, sequence).returned = { rank: i + 1, sequence }; });
    bestFirst(root);
    const count = { returned: 0, finished: 0, alive: 0, dropped: 0 };
    for (const fate of leavesOf(root).map(fateOf)) count[fate] += 1;
    this.note.textContent = `${count.returned} hypotheses returned, best first; ${count.finished} finished `
      + `with a lower score, ${count.alive} still live when the search ended, ${count.dropped} dropped on the way.`;
    this.tree.replaceChildren(element("ul", { class: "tree", dir: "auto" },
      ...root.children.map((child) => this.branch(child))));
    this.shorten();
  }

  /** Leave the dropped hypotheses out where they are not wanted. */
  shorten() {
    this.tree.firstChild?.classList.toggle("short", !this.all.checked);
  }

  branch(node) {
    const steps = [node];
    while (steps.at(-1).children.length === 1) steps.push(...steps.at(-1).children);
    const last = steps.at(-1);
    const fate = last.children.length ? "" : fateOf(last);
    const segment = element("span", { class: `segment ${fate}` }, ...steps.map(step),
      ...(fate && fate !== "returned" ? [element("small", {}, FATES[fate], ` ${last.score?.toFixed(3) ?? ""}`)] : []));
    const rest = last.returned ? [this.leaf(last.returned)] : last.children.map((child) => this.branch(child));
    return element("li", {}, segment, ...(rest.length ? [element("ul", {}, ...rest)] : []));
  }

  leaf({ rank, sequence }) {
    const { score, details } = sequence;
    const ended = ENDED[details.finish_reason];
    return element("li", {}, element("button", {
      type: "button", class: rank === 1 ? "leaf best" : "leaf", title: "Look at this one",
      "aria-label": `Hypothesis ${rank}, score ${score.toFixed(3)}, ${ended}. Look at it`,
      click: () => this.onPick(rank - 1),
    }, element("b", {}, `#${rank}`), ` ${score.toFixed(3)}`, element("small", {}, ended)));
  }
}

/** A sequence with each token's alternatives beside it, as a stream tells them. */
function withCandidates(sequence) {
  const { tokens, top_tokens: others } = sequence.details;
  return { ...sequence, text: sequence.generated_text,
    tokens: tokens.map((token, i) => ({ ...token, top_tokens: others?.[i] })) };
}

/** One token of a segment. */
function step({ token }) {
  const p = probability(token.logprob);
  return element("span", {
    class: token.special ? "step special" : "step", title: percent(p),
  }, element("span", { class: "text" }, label(token)), bar(p),
  element("span", { class: "percent" }, percent(p)));
}

const FATES = { finished: "finished, not among the best", alive: "still live", dropped: "dropped" };

const fateOf = ({ returned, finished, live }) => (
  returned ? "returned" : finished ? "finished" : live ? "alive" : "dropped");

/** The hypotheses that nothing goes on from. */
const leavesOf = (node) => (node.children.length ? node.children.flatMap(leavesOf) : [node]);

const UNRANKED = Number.MAX_SAFE_INTEGER; // not infinite: ranks are subtracted

/** Put what leads to the best answers first; the place of the best that a node leads to. */
function bestFirst(node) {
  const ranked = node.children.map((child) => [bestFirst(child), child]);
  node.children = ranked.sort(([a], [b]) => a - b).map(([, child]) => child);
  return Math.min(node.returned?.rank ?? UNRANKED, ...ranked.map(([rank]) => rank));
}

/** The node that a sequence ends in. */
function endOf(root, { details: { tokens } }) {
  return tokens.reduce((node, { id }, i) => node.children.find((child) => (
    child.token.id === id && child.finished === (i === tokens.length - 1))), root);
}

/** The tree of all steps: a node has its token, its score, and what goes on from it. */
function grown(steps) {
  const root = { children: [] };
  let live = [root];
  for (const beams of steps) {
    const before = live;
    live = [];
    for (const { parent, ...beam } of beams) {
      const node = { ...beam, children: [] };
      before[parent].children.push(node);
      if (!beam.finished) live.push(node);
    }
  }
  for (const node of live) node.live = true;
  return root;
}
