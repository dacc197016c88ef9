"""POST /translate and /detect, GET /languages and /frontend/settings: LibreTranslate's API.

A text becomes its sentences, which run as one batch of /generate. Fields are read as that API's
clients send them, as JSON or as a form, with the API key among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal
from urllib.parse import parse_qsl

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from seqserve.errors import InvalidRequestError, SeqserveError, UnauthorizedError
from seqserve.parameters import Strict
from seqserve.schemas import GenerateRequest, GenerateResponse, Texts, as_list
from service.errors import Dialect
from service.keys import ApiKeys
from service.language_codes import has_spaces, language_name
from service.planning import Plan
from service.routes.common import (
    JsonRequest,
    JsonRoute,
    body_size,
    model_of,
    models_of,
    settings_of,
    sized,
)
from service.routes.generate import generate_request, planned, sequences_of, whole
from service.sentences import SplitText
from service.served import ServedModel
from service.settings import Settings
from service.translation import Direction, sentences_of
from service.validation import parse_json, shown

FORM = "application/x-www-form-urlencoded"

FURTHER_FIELDS = 16
"""Of a form, beside the texts."""

TYPING_PAUSE = 500
"""Milliseconds after which a page may translate what was typed."""


class FormRequest(JsonRequest):
    """A request whose body is JSON or a form, and may have the API key in it.

    A body that begins with `{` is JSON whatever it is declared as: a form would have that escaped,
    and `curl -d` calls everything a form.
    """

    def parse(self, body: bytes) -> Any:
        content = self._content(body)
        keys: ApiKeys = self.app.state.keys
        if not keys.sent(self.headers):
            key = content.get("api_key") if isinstance(content, dict) else None
            keys.check_key(key if isinstance(key, str) else None)
        return content

    def _content(self, body: bytes) -> Any:
        declared = self.state.content_type.partition(";")[0].strip().lower()
        if declared.startswith("multipart/"):
            raise InvalidRequestError(
                f"content-type must be application/json or {FORM}, got {shown(declared)}",
                "content-type",
                status=415,
            )
        if declared == FORM and not body.lstrip().startswith(b"{"):
            return read_form(body, settings_of(self).max_inputs + FURTHER_FIELDS)
        return parse_json(body)


class FormRoute(JsonRoute):
    """A route whose handler gets a `FormRequest`."""

    request_class = FormRequest


router = APIRouter(route_class=FormRoute, tags=["libretranslate"])

# --- errors --------------------------------------------------------------------------------------


class ErrorMessage(BaseModel):
    """What all of LibreTranslate's errors are."""

    error: str


def _status(error: SeqserveError) -> int:
    if isinstance(error, UnauthorizedError):
        return 403
    return 400 if error.status == 422 else error.status


PATHS = frozenset({"/detect", "/frontend/settings", "/languages", "/translate"})

DIALECT = Dialect(
    lambda method, path: path in PATHS,
    lambda error, request_id: ErrorMessage(error=error.message).model_dump(),
    _status,
)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorMessage, "description": "The request is wrong, or there are too many."},
    "5XX": {
        "model": ErrorMessage,
        "description": "The model failed, is loading, or took too long.",
    },
}

# --- requests ------------------------------------------------------------------------------------


class TranslateRequest(Strict):
    """Translate each text."""

    q: Texts = Field(description="A text, or a list of texts.", examples=["Hello world!"])
    source: str = Field(description="Language of the texts. `auto` is refused: nothing detects it.")
    target: str = Field(description="Language to translate them to.")
    format: Literal["text"] = Field("text", description="`html` is not supported.")
    alternatives: int = Field(0, ge=0, description="How many other translations to return at most.")
    api_key: str | None = Field(None, description="Or else in a header.")

    @property
    def texts(self) -> list[str]:
        return as_list(self.q)

    @property
    def is_list(self) -> bool:
        """Whether the answer has lists."""
        return isinstance(self.q, list)

    def place(self, index: int) -> str:
        """How an error message calls a text."""
        return f"q[{index}]" if self.is_list else "q"


class DetectRequest(Strict):
    """Tell the language of a text."""

    q: Texts = Field(description="A text, or a list of texts.")
    api_key: str | None = Field(None, description="Or else in a header.")


def read_form(body: bytes, most: int) -> dict[str, Any]:
    """An encoded form as what JSON would have said; of several `q` a list.

    Args:
        most: fields that it may have.

    Raises:
        InvalidRequestError: it is not UTF-8, has too many fields, or has one other than `q` twice.
    """
    try:
        pairs = parse_qsl(
            body.decode("utf-8"), keep_blank_values=True, errors="strict", max_num_fields=most
        )
    except UnicodeError:
        raise InvalidRequestError("the form is not valid UTF-8", status=400) from None
    except ValueError:
        raise InvalidRequestError(f"the form has more than {most} fields (max_inputs)") from None
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields and name != "q":
            raise InvalidRequestError(f"{shown(name)} stands more than once in the form", name)
        fields.setdefault(name, []).append(value)
    texts = fields.pop("q", None)
    fields = {name: _typed(name, value) for name, [value] in fields.items() if value}
    return fields if texts is None else fields | {"q": texts if len(texts) > 1 else texts[0]}


def _typed(name: str, value: str) -> str | int:
    """A form's value with its field's type, if it could be of it."""
    count = name == "alternatives" and value.isdecimal() and len(value) < len(str(2**31))
    return int(value) if count else value


FORM_TOO: dict[str, Any] = {
    "requestBody": {
        "content": {
            FORM: {
                "schema": {
                    "type": "object",
                    "description": "The same fields; several `q` are a list.",
                }
            }
        }
    }
}
"""For the OpenAPI document."""

# --- answers -------------------------------------------------------------------------------------


class TranslateResponse(BaseModel):
    """Texts where texts were given, lists where lists were."""

    translatedText: str | list[str]  # noqa: N815  as that API has it
    alternatives: list[str] | list[list[str]] | None = Field(
        None, description="Only where the request asks for some: others than the translation."
    )


class Detection(BaseModel):
    """What a text's language may be."""

    language: str
    confidence: float


class Language(BaseModel):
    """A language of texts, and what they can be translated to."""

    code: str
    name: str
    targets: list[str]


class NamedLanguage(BaseModel):
    """A language that a page begins with."""

    code: str
    name: str


class Ends(BaseModel):
    """Languages that a page begins with."""

    source: NamedLanguage
    target: NamedLanguage


class FrontendSettings(BaseModel):
    """What a page in front of the API has to know."""

    charLimit: int  # noqa: N815
    frontendTimeout: int  # noqa: N815
    apiKeys: bool  # noqa: N815
    keyRequired: bool  # noqa: N815
    suggestions: bool
    filesTranslation: bool  # noqa: N815
    supportedFilesFormat: list[str]  # noqa: N815
    language: Ends | None = Field(description="Null where nothing translates.")


@router.post(
    "/translate",
    summary="Translate texts, sentence by sentence",
    response_model=TranslateResponse,
    responses=ERRORS,
    openapi_extra=FORM_TOO,
)
async def translate(request: Request, body: TranslateRequest) -> Response:
    """A text's sentences are translated as one batch; its white space stays as it is."""
    if body.source == "auto":
        raise _no_detector("source")
    settings = settings_of(request)
    check_alternatives(body.alternatives, settings)
    direction = models_of(request).direction(body.source, body.target)
    model = model_of(request, direction.model, len(body.texts))
    texts = await sized(await body_size(request), _split, body, model, direction)
    sentences = [sentence for text in texts for sentence in text.sentences]
    check_sentences(len(sentences), settings)
    plans: list[Plan] = []
    if sentences:
        model, plans = await planned(
            request, _generation(sentences, direction, body.alternatives, model)
        )
    join = partial(SplitText.join, between=" " if has_spaces(direction.target) else "")
    return await whole(request, model, plans, None, partial(_answer, body, texts, join))


@router.post(
    "/detect",
    summary="Tell the language of a text: refused, as nothing here detects it",
    response_model=list[Detection],
    responses=ERRORS,
    openapi_extra=FORM_TOO,
)
async def detect(request: Request, body: DetectRequest) -> Response:
    """Always an error that says so."""
    raise _no_detector("q")


@router.get("/languages", summary="What can be translated to what", responses=ERRORS)
async def languages(request: Request) -> list[Language]:
    """Of the models in memory. English is first, the others follow by their names."""
    return [
        Language(code=code, name=language_name(code), targets=targets)
        for code, targets in models_of(request).translator.languages.items()
    ]


@router.get("/frontend/settings", summary="What a page has to know", responses=ERRORS)
async def frontend_settings(request: Request) -> FrontendSettings:
    """Limits, and the languages that a page begins with."""
    keys: ApiKeys = request.app.state.keys
    first = next(iter(models_of(request).translator.languages.items()), None)
    ends = first and Ends(source=_named(first[0]), target=_named(first[1][0]))
    return FrontendSettings(
        charLimit=settings_of(request).max_characters,
        frontendTimeout=TYPING_PAUSE,
        apiKeys=bool(keys),
        keyRequired=bool(keys),
        suggestions=False,
        filesTranslation=False,
        supportedFilesFormat=[],
        language=ends,
    )


def _named(code: str) -> NamedLanguage:
    return NamedLanguage(code=code, name=language_name(code))


def _no_detector(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        "this server does not detect languages: name the one of the texts as source", param
    )


def check_alternatives(alternatives: int, settings: Settings) -> None:
    """Refuse more alternatives than a beam search may return.

    Raises:
        InvalidRequestError: names the limit.
    """
    name, limit = min(
        settings.beam_limit,
        ("max_return_sequences", settings.max_return_sequences),
        key=lambda entry: entry[1],
    )
    if alternatives >= limit:
        raise InvalidRequestError(
            f"alternatives must be at most {limit - 1} ({name}), got {alternatives}", "alternatives"
        )


def check_sentences(count: int, settings: Settings) -> None:
    """Refuse texts that come to more sentences than a request may have inputs.

    Raises:
        InvalidRequestError: names the limit.
    """
    if count > settings.max_inputs:
        raise InvalidRequestError(
            f"q comes to {count} sentences, at most {settings.max_inputs} are allowed (max_inputs)",
            "q",
        )


def _split(body: TranslateRequest, model: ServedModel, direction: Direction) -> list[SplitText]:
    return [
        sentences_of(text, model.generator, direction, body.place(i))
        for i, text in enumerate(body.texts)
    ]


def _generation(
    sentences: Sequence[str], direction: Direction, alternatives: int, model: ServedModel
) -> GenerateRequest:
    """What the engine is asked: the model's own decoding, or enough beams for the alternatives."""
    parameters: dict[str, Any] = {
        "task": direction.task,
        "src_lang": direction.src_lang,
        "tgt_lang": direction.tgt_lang,
    }
    if alternatives:
        own = model.loaded.spec.defaults.num_beams or 1
        parameters["num_return_sequences"] = alternatives + 1
        parameters["num_beams"] = max(own, alternatives + 1)
    return generate_request(model=direction.model, inputs=list(sentences), parameters=parameters)


def _answer(
    body: TranslateRequest,
    texts: Sequence[SplitText],
    join: Callable[[SplitText, list[str]], str],
    replies: Sequence[GenerateResponse],
) -> dict[str, Any]:
    """The answer's JSON, of a reply for each sentence."""
    rest = iter(replies)
    told = [
        _hypotheses(text, [next(rest) for _ in text.sentences], body.alternatives, join)
        for text in texts
    ]
    translated = [best for best, *_ in told]
    others = [list(dict.fromkeys(o for o in other if o not in ("", best))) for best, *other in told]
    answer: dict[str, Any] = {"translatedText": translated if body.is_list else translated[0]}
    if body.alternatives:
        answer["alternatives"] = others if body.is_list else others[0]
    return answer


def _hypotheses(
    text: SplitText,
    replies: Sequence[GenerateResponse],
    alternatives: int,
    join: Callable[[SplitText, list[str]], str],
) -> list[str]:
    """Translations of a text, best first: of each sentence the first, the second, and so on."""
    ranked = [[sequence.generated_text or "" for sequence in sequences_of(r)] for r in replies]
    return [
        join(text, [sentence[min(place, len(sentence) - 1)] for sentence in ranked])
        for place in range(alternatives + 1)
    ]
