"""The errors a user can meet, one class per audience.

Every message says what was given, what was expected and what to do.
"""


class DFlashError(Exception):
    """Base of every error raised on purpose by this package."""


class ConfigError(DFlashError):
    """A model description (config.json, GGUF metadata) that cannot be used as it stands."""


class CheckpointError(DFlashError):
    """Weight or tokenizer files that are missing, damaged or do not fit their configuration."""


class TokenizerError(CheckpointError):
    """A tokenizer that cannot be rebuilt from what a file says; token ids can still be given."""


class PlanError(DFlashError):
    """A plan that contradicts itself, the models or the memory of the device."""


class RequestError(DFlashError):
    """A request that cannot be served: empty, too long, out of range."""


class StructureError(RequestError):
    """An output structure that cannot be followed.

    Attributes:
      of_prompt: the structure can be followed, but not after the text that the output continues.
    """

    def __init__(self, message: str, *, of_prompt: bool = False):
        super().__init__(message)
        self.of_prompt = of_prompt


class PromptTooLongError(RequestError):
    """A prompt whose characters alone show that it cannot fit, found before it is encoded."""


class InterruptedRequestError(DFlashError):
    """Work on a request that reached its time limit, or that its caller gave up."""


class QueueFullError(DFlashError):
    """The engine has as many waiting requests as its plan allows; try again later."""


class SnapshotError(DFlashError):
    """A kept prefix that does not fit the engine's state. The engine feeds the prompt instead."""


class ComputeError(DFlashError):
    """The device produced something unusable, such as non-finite target logits."""


class HostError(DFlashError):
    """A host of a run on several hosts that is gone, fails, or does not answer."""


class NativeError(DFlashError):
    """The native kernels cannot be compiled here."""


class ForkedProcessError(DFlashError):
    """An engine or model used in a process that was forked after it was loaded."""


def install_hint(extra: str) -> str:
    """Return how to install one of the project's extras, for error messages.

    The project is on no package index: it is installed from its checkout.
    """
    return f"install the extra from the checkout: pip install -e '.[{extra}]'"
