// The page: who is asked what, and where the answer is shown.

import { ApiError, get, key, post, stream } from "./api.js";
import { AttentionView } from "./attention.js";
import { BeamView } from "./beams.js";
import { arrows, byId, element } from "./dom.js";
import { FieldError, ParameterForm } from "./form.js";
import { LivePanel } from "./live.js";
import { attentionBody, beamBody, generateBody } from "./request.js";
import { curl, python } from "./snippets.js";
import { TokenStrip } from "./tokens.js";

const OWN_CHOICES = ["task", "src_lang", "tgt_lang"];

const here = new URL(".", document.baseURI).href.replace(/\/$/, "");
const state = {
  info: null, // what /info has
  request: null, // of the answer at hand
  opening: "", // what its kept tokens spell
  sequences: [], // its answers, best first: {tokens, text, generated_text, details}
  shown: 0, // which of them
  running: null, // an AbortController
};

const strip = new TokenStrip(byId("tokens"), continueFrom);
const attention = new AttentionView(byId("attention"));
const beams = new BeamView(byId("beams"), { onSearch: searchBeams, onPick: adopt });
const live = new LivePanel(byId("live"), byId("live-note"), knowServer);
let form;

// --- what is asked -------------------------------------------------------------------------------

const model = () => state.info.models.find(({ name }) => name === byId("model").value);

/** The request that the form describes. Throws a `FieldError`. */
function described() {
  const parameters = form.values();
  for (const name of OWN_CHOICES) {
    if (byId(name).value) parameters[name] = byId(name).value;
  }
  const first = state.info.models[0].name;
  return { model: model(), first, source: byId("source").value, parameters, kept: [] };
}

/** Generate what `requested` gives; what ran before ends. */
async function run(requested) {
  const signal = begin();
  try {
    const request = requested();
    const opening = await spelled(request, signal);
    showRequest(request, opening);
    const body = generateBody(request);
    showCode(body);
    for await (const event of stream("generate", { ...body, stream: true }, signal)) {
      signal.throwIfAborted(); // several events may have come at once
      take(event);
    }
    showSequence(state.shown);
  } catch (error) {
    fail(error);
  } finally {
    end(signal);
  }
  if (state.sequences[state.shown]?.details) openTab(openedTab()); // what is open shows the answer
}

/** What the tokens that the target begins with spell. */
async function spelled({ model: { name, target_tokenizer: spells }, kept }, signal) {
  if (!kept.length || !spells) return "";
  const input_ids = kept.map(({ id }) => id);
  return (await post("detokenize", { model: name, input_ids }, signal)).text;
}

function begin() {
  state.running?.abort();
  state.running = new AbortController();
  fault(null);
  byId("run").hidden = true;
  byId("stop").hidden = false;
  return state.running.signal;
}

function end(signal) {
  if (state.running?.signal !== signal) return; // another one has begun
  state.running = null;
  byId("answer").classList.remove("growing");
  byId("run").hidden = false;
  byId("stop").hidden = true;
}

// --- what is answered ----------------------------------------------------------------------------

function showRequest(request, opening) {
  const sequences = [{ tokens: [...request.kept], text: opening }];
  Object.assign(state, { request, opening, sequences, shown: 0 });
  strip.show(request.kept);
  byId("answer").textContent = opening;
  byId("answer").classList.add("growing");
  byId("sequences").hidden = true;
  byId("status").textContent = "generating …";
  attention.clear("The maps are drawn when the answer is complete.");
  beams.clear();
}

/** One event of a stream. */
function take({ sequence, token, top_tokens, generated_text, details }) {
  const answer = (state.sequences[sequence] ??= { tokens: [...state.request.kept], text: state.opening });
  if (token) answer.tokens.push({ ...token, top_tokens });
  if (token && !token.special) answer.text += token.text ?? "";
  if (details) Object.assign(answer, { generated_text, details });
  if (sequence !== state.shown) return;
  if (token) strip.add(answer.tokens.at(-1));
  byId("answer").textContent = answer.text;
}

/** Show one of the answers. */
function showSequence(index) {
  state.shown = index;
  const { tokens, generated_text: whole, details } = state.sequences[index];
  strip.show(tokens);
  byId("answer").textContent = whole ?? tokens.map(({ id }) => id).join(" ");
  byId("status").textContent = details ? summary(details) : "";
  showPicker();
}

function summary(details) {
  const parts = [`${details.generated_tokens} tokens`];
  if (details.inference_time !== undefined) parts.push(`${details.inference_time.toFixed(0)} ms`);
  if (details.queue_time > 1) parts.push(`${details.queue_time.toFixed(0)} ms in the queue`);
  if (details.finish_reason === "length") parts.push("cut at the length limit");
  if (details.unknown_tokens) parts.push(`${details.unknown_tokens} unknown in the source`);
  if (details.seed !== null) parts.push(`seed ${details.seed}`);
  return parts.join(" · ");
}

function showPicker() {
  const group = byId("sequences");
  group.hidden = state.sequences.length < 2;
  group.replaceChildren(...state.sequences.map(({ generated_text: whole, details }, i) => element("button", {
    type: "button", dir: "auto", "aria-pressed": String(i === state.shown),
    click: () => { showSequence(i); group.children[i].focus(); },
  }, `${i + 1}. ${whole ?? "…"}`, scoreOf(details))));
}

const scoreOf = (details) => (typeof details?.score === "number"
  ? element("small", {}, ` ${details.score.toFixed(3)}`) : "");

/** Look at one of the beam search's answers, in all views. */
function adopt(index) {
  Object.assign(state, { request: beams.request, sequences: beams.sequences });
  showSequence(index);
}

/** Keep the tokens before `index`, put another one there, and go on. */
function continueFrom(index, other) {
  const { tokens } = state.sequences[state.shown];
  const kept = tokens.slice(0, index).map((token) => ({ ...token, kept: true }));
  kept.push({ ...other, top_tokens: tokens[index].top_tokens, kept: true, chosen: true });
  run(() => ({ ...state.request, kept }));
}

// --- tabs ----------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];
const openedTab = () => tabs.find((tab) => tab.getAttribute("aria-selected") === "true");

function openTab(tab) {
  for (const other of tabs) {
    const open = other === tab;
    other.setAttribute("aria-selected", String(open));
    other.tabIndex = open ? 0 : -1;
    byId(other.getAttribute("aria-controls")).hidden = !open;
  }
  if (tab.id === "tab-attention") showAttention();
  if (tab.id === "tab-beams" && state.request && !state.running && !beams.request) {
    searchBeams(beams.width.valueAsNumber, state.request);
  }
}

async function showAttention() {
  const answer = state.sequences[state.shown];
  if (!answer?.details || attention.answer === answer) return;
  const { tokens } = answer;
  const fed = tokens.at(-1)?.special ? tokens.slice(0, -1) : tokens; // the last one is never fed
  try {
    await attention.show(answer, attentionBody(state.request, fed));
  } catch (error) {
    fail(error);
  }
}

async function searchBeams(width, request) {
  const signal = begin();
  try {
    const asked = { ...(request ?? described()), kept: [] };
    beams.begin(asked);
    const body = beamBody(asked, width);
    showCode(body);
    const answer = await post("generate", body, signal);
    const sequences = answer.sequences ?? [answer];
    beams.show({ sequences, steps: sequences[0].details.beam_steps ?? [] });
  } catch (error) {
    beams.clear();
    fail(error);
  } finally {
    end(signal);
  }
}

// --- code ----------------------------------------------------------------------------------------

function showCode(body) {
  const guarded = Boolean(key.get());
  byId("code").replaceChildren(
    snippet("curl", curl(here, "generate", body, guarded)),
    snippet("Python", python(here, body, guarded)),
  );
}

/** The code of what the form describes now. */
function followForm() {
  byId("reset").hidden = form.pristine;
  if (!state.info) return;
  try {
    showCode(generateBody(described()));
  } catch (error) {
    if (!(error instanceof FieldError)) throw error; // a field half typed; Run says so
  }
}

function snippet(title, code) {
  const shown = element("code", {}, code);
  const copy = element("button", {
    type: "button", class: "quiet", "aria-label": `Copy the ${title} code`,
    click: async () => {
      copy.textContent = await copied(shown);
      setTimeout(() => { copy.textContent = "Copy"; }, 1500);
    },
  }, "Copy");
  return element("section", { class: "snippet" },
    element("div", { class: "title" }, element("h3", {}, title), copy),
    element("pre", { tabindex: "0" }, shown));
}

/** Copy what an element says; where a page may not (plain HTTP), select it to be copied. */
async function copied(shown) {
  if (navigator.clipboard) {
    await navigator.clipboard.writeText(shown.textContent);
    return "Copied";
  }
  getSelection().selectAllChildren(shown);
  return "Selected";
}

// --- errors --------------------------------------------------------------------------------------

function fail(error) {
  if (error.name === "AbortError") {
    if (state.running.signal.aborted) byId("status").textContent = "stopped"; // else superseded
  } else if (error instanceof ApiError || error instanceof FieldError) {
    byId("status").textContent = "";
    fault(error);
  } else {
    fault(new ApiError(`The page failed: ${error.message}`));
    console.error(error);
  }
}

/** Show what went wrong, also at the field that it is about. */
function fault(error) {
  const box = byId("fault");
  box.hidden = error === null;
  form?.blame(error?.param ?? null, error?.message);
  if (error === null) return;
  const status = error.status ? `Status ${error.status}` : "";
  const id = error.requestId ? `request ${error.requestId}` : "";
  const wait = error.retryAfter ? `try again in ${error.retryAfter} s` : "";
  box.replaceChildren(element("p", {}, error.message),
    element("small", {}, [status, wait, id].filter(Boolean).join(" · ")));
  if (error.status === 401) askForKey();
}

function askForKey() {
  byId("key-form").hidden = false;
  byId("key").focus();
}

// --- the server ----------------------------------------------------------------------------------

/** Take over what /info has: at first, and whenever the live panel looks. */
function knowServer(info) {
  const names = info.models.map(({ name, state: now }) => `${name} ${now}`).join();
  const known = state.info?.models.map(({ name, state: now }) => `${name} ${now}`).join();
  state.info = info;
  if (names !== known) showModels();
}

function showModels() {
  const select = byId("model");
  const chosen = select.value;
  select.replaceChildren(...state.info.models.map(({ name, state: now }) => element("option", {
    value: name, disabled: now !== "ready",
  }, now === "ready" ? name : `${name} (${now})`)));
  const ready = state.info.models.filter(({ state: now }) => now === "ready");
  select.value = ready.some(({ name }) => name === chosen) ? chosen : (ready[0]?.name ?? "");
  byId("run").disabled = ready.length === 0;
  if (ready.length) suitModel();
  else byId("server").textContent = `version ${state.info.version} · no model is ready`;
}

/** Offer what the chosen model takes. */
function suitModel() {
  const now = model();
  live.watch(now.name);
  form.suit(now.generation_defaults);
  beams.limit = state.info.limits.max_beams;
  options("task", Object.keys(now.tasks ?? {}), "none");
  options("src_lang", now.languages ?? [], now.default_src_lang ?? "choose");
  options("tgt_lang", now.languages ?? [], now.default_tgt_lang ?? "choose");
  byId("source-label").textContent = now.source_tokenizer ? "Source" : "Source, as token ids";
  byId("server").textContent = [`version ${state.info.version}`, now.family, now.device,
    now.dtype, `${(now.parameters / 1e6).toFixed(1)} M weights`].join(" · ");
  followForm();
}

function options(name, values, nothing) {
  const select = byId(name);
  const chosen = select.value;
  select.closest("label").hidden = values.length === 0;
  select.replaceChildren(element("option", { value: "" }, nothing),
    ...values.map((value) => element("option", { value }, value)));
  select.value = values.includes(chosen) ? chosen : "";
}

async function start() {
  const { components } = await get("openapi.json");
  const schema = components.schemas.GenerationParameters;
  form = new ParameterForm(byId("parameters"), schema, followForm);
  await connect();
}

async function connect() {
  try {
    knowServer(await get("info"));
    fault(null);
  } catch (error) {
    fail(error);
  }
  await live.poll();
}

byId("request").addEventListener("submit", (event) => { event.preventDefault(); run(described); });
byId("source").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!byId("run").disabled) run(described);
});
byId("stop").addEventListener("click", () => state.running?.abort());
byId("reset").addEventListener("click", () => form.reset());
byId("model").addEventListener("change", suitModel);
for (const name of [...OWN_CHOICES, "source"]) byId(name).addEventListener("input", followForm);
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key.set(byId("key").value.trim());
  byId("key-form").hidden = true;
  await connect();
});
for (const tab of tabs) tab.addEventListener("click", () => openTab(tab));
for (const tab of tabs) tab.addEventListener("focus", () => openTab(tab));
arrows(document.querySelector("[role=tablist]"), () => tabs);
start().catch(fail);
