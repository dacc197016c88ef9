// What is asked: a source, a model, parameters, and what the target is to begin with.

const SAMPLING = ["do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "seed"];

/** A source as the model takes it: a text, or ids where it has no tokenizer. */
export function inputOf(model, source) {
  if (model.source_tokenizer) return { inputs: source };
  return { input_ids: source.split(/[\s,]+/).filter(Boolean).map(Number) };
}

/**
 * A body of /generate.
 *
 * `kept` are the tokens that the target begins with: they count against the lengths that a person
 * asked for, which are those of the whole answer.
 */
export function generateBody({ model, first, source, parameters, kept }) {
  const wanted = { ...parameters };
  if (kept.length) {
    wanted.target_prefix_ids = kept.map(({ id }) => id);
    wanted.return_full_text = true;
    for (const name of ["max_new_tokens", "min_new_tokens"]) {
      if (name in wanted) wanted[name] = Math.max(0, wanted[name] - kept.length);
    }
    if (saysLanguage(kept)) delete wanted.tgt_lang;
  }
  return { ...named(model, first), ...inputOf(model, source), parameters: { ...wanted, details: true } };
}

/** The same as a beam search that tells all its hypotheses; what only sampling uses is left out. */
export function beamBody(request, width) {
  const body = generateBody(request);
  const parameters = { ...body.parameters, num_beams: width, num_return_sequences: width,
    beam_steps: true };
  for (const name of SAMPLING) delete parameters[name];
  return { ...body, parameters };
}

/** A body of /attention for an answer's tokens. It knows no tasks: their prefix goes before the text. */
export function attentionBody({ model, first, source, parameters }, tokens) {
  const { task, src_lang, tgt_lang } = parameters;
  const input = inputOf(model, (model.tasks?.[task]?.prefix ?? "") + source);
  const body = { ...named(model, first), ...input };
  if (src_lang) body.src_lang = src_lang;
  if (tgt_lang && !saysLanguage(tokens)) body.tgt_lang = tgt_lang;
  if (tokens.length) body.target_ids = tokens.map(({ id }) => id);
  return body;
}

/** The first model answers requests that name none. */
const named = (model, first) => (model.name === first ? {} : { model: model.name });

/** Whether tokens begin with the language's own, which says what `tgt_lang` would. */
const saysLanguage = ([token]) => Boolean(token?.special);
