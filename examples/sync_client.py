"""The client: answers, details, errors."""

from seqserve import Client
from seqserve.errors import InvalidRequestError, NoConnectionError


def main() -> None:
    with Client(timeout=30) as client:
        try:
            model = client.models()[0]
        except NoConnectionError as error:
            raise SystemExit(f"no server ({error}); start one with `make serve`") from error
        print(f"{model.name}: {model.family} on {model.device}, {model.state}")

        print("an answer:", client.generate("transformer").generated_text)

        pair = client.generate(["left", "right"])
        print("two answers:", [answer.generated_text for answer in pair])

        best = client.generate("read", {"num_beams": 4, "num_return_sequences": 3})
        for sequence in best.sequences or []:
            print(f"  {sequence.score:7.3f}  {sequence.generated_text}")

        details = client.generate("cat", {"details": True}).details
        assert details is not None  # they were asked for
        for token in details.tokens:
            print(f"  {token.id:3d} {token.logprob:7.3f}  {token.text!r}")

        try:
            client.generate("cat", {"top_p": 1.5})
        except InvalidRequestError as error:
            print(f"refused, status {error.status}, because of {error.param}: {error}")


if __name__ == "__main__":
    main()
