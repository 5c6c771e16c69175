"""Parts of messages that are no text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agl_fast.proxy.large_json import elements_of, members_of

# Within the type of a content part: image_url, input_audio, video_url, prompt_embeds, …
_TYPES = ("image", "audio", "video", "embeds")
# What a content part holds, where it may lack a type.
_NAMES = frozenset(
    (
        *("image", "image_url", "image_pil", "image_embeds", "input_image"),
        *("audio", "audio_url", "audio_embeds", "input_audio"),
        *("video", "video_url", "prompt_embeds"),
    )
)


def media_of(messages: Any, reference: str) -> str | None:
    """What the first part that is no text is called; None: there is text only.

    A part counts by its type, or without one by the names of what it holds.

    Args:
        reference: key of a part whose content is in the server's cache.
    """
    for message in elements_of(messages):
        for part in _parts((members_of(message) or {}).get("content")):
            if (name := _media_name(part, reference)) is not None:
                return name
    return None


def _parts(content: Any) -> Iterator[Mapping[str, Any]]:
    """Every object within a message's content, at any depth."""
    waiting = [iter((content,))]
    while waiting:
        for each in waiting[-1]:
            part = members_of(each)
            if part is None:
                waiting.append(iter(elements_of(each)))
            else:
                yield part
                waiting.append(iter((part.get("content"),)))
            break
        else:
            waiting.pop()


def _media_name(part: Mapping[str, Any], reference: str) -> str | None:
    kind = part.get("type")
    if isinstance(kind, str) and any(word in kind for word in _TYPES):
        return kind
    for name in _NAMES & part.keys():
        # Clients write null for what a part of text lacks.
        if part[name] is not None or part.get(reference) is not None:
            return name
    return None
