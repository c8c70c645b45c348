"""What an engine can serve at all, checked before a request is queued."""

from flexmarl.core.errors import ConfigError
from flexmarl.core.records import GenerationRequest


def check_request(request: GenerationRequest, *, context_tokens: int | None, vocabulary_size: int | None) -> None:
    """Raise ConfigError when no engine with this context and vocabulary can ever serve `request`; None is unbounded."""
    sampling, prompt, name = request.sampling, request.prompt_tokens, request.request_id
    if not prompt:
        raise ConfigError(f"request {name}: the prompt is empty, expected at least one token")
    if context_tokens is not None and len(prompt) >= context_tokens:
        raise ConfigError(
            f"request {name}: the prompt has {len(prompt)} tokens, but the model's context of {context_tokens} must "
            "hold it and a new token: shorten the conversation, or use a model with a longer context"
        )
    if vocabulary_size is not None and not (0 <= min(prompt) and max(prompt) < vocabulary_size):
        raise ConfigError(
            f"request {name}: prompt tokens lie in [{min(prompt)}, {max(prompt)}], but the model has ids 0 to "
            f"{vocabulary_size - 1}: the tokenizer is not the model's"
        )
    if sampling.max_new_tokens < 1:
        raise ConfigError(f"request {name}: max_new_tokens is {sampling.max_new_tokens}, expected at least 1")
    if not 0.0 <= sampling.temperature < float("inf"):
        raise ConfigError(f"request {name}: temperature is {sampling.temperature}, expected 0 or more, and finite")
    if not 0.0 < sampling.top_p <= 1.0:
        raise ConfigError(f"request {name}: top_p is {sampling.top_p}, expected more than 0 and at most 1")
    if sampling.top_k is not None and sampling.top_k < 1:
        raise ConfigError(f"request {name}: top_k is {sampling.top_k}, expected at least 1, or null for no limit")
    if not 0 <= request.seed < 2**64:
        raise ConfigError(f"request {name}: seed is {request.seed}, expected 0 to 2**64 - 1")
