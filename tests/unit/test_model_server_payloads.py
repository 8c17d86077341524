"""The bodies of answers."""

from __future__ import annotations

import json
import math

import pytest

from guard_middleware.testing.model_server import payloads


def test_an_embedding_is_deterministic_of_length_one_and_of_its_model():
    """The same text gives the same vector, another text or another model another one."""
    first = payloads.vector("m1", "text", 100)

    assert first == payloads.vector("m1", "text", 100)
    assert first != payloads.vector("m1", "other", 100)
    assert first != payloads.vector("m2", "text", 100)
    assert math.hypot(*first) == pytest.approx(1.0)


def test_embeddings_answer_each_input_in_order():
    """A list of texts gives a vector each, a single text one; a list of tokens is one input."""
    answer = json.loads(payloads.embeddings("m", {"input": ["a", "b"]}, 4))
    single = json.loads(payloads.embeddings("m", {"input": "b"}, 4))
    tokens = json.loads(payloads.embeddings("m", {"input": [1, 2, 3]}, 4))

    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert answer["data"][1]["embedding"] == single["data"][0]["embedding"]
    assert len(single["data"][0]["embedding"]) == 4
    assert len(tokens["data"]) == 1


def test_a_stream_adds_up_to_the_plain_answer():
    """However many chunks a stream is cut into, its text is that of the completion."""
    whole = json.loads(payloads.completion("1", "m", "hello", 0))["choices"][0]["message"]["content"]
    for chunks in (1, 2, 3, 20):
        stream = payloads.Stream("1", "m", "hello", 0, chunks)
        events = [json.loads(stream.chunk(index).removeprefix(b"data: ")) for index in range(chunks)]
        assert "".join(event["choices"][0]["delta"]["content"] for event in events) == whole


def test_answers_do_not_quote_the_prompt():
    """A prompt that turns up in a log was not put there by the answer."""
    assert b"s3cret" not in payloads.completion("1", "m", "my s3cret plan", 0)


def test_the_out_of_memory_body_quotes_the_prompt():
    """Some servers do, and whoever logs bodies then logs prompts."""
    assert b"CUDA out of memory" in payloads.out_of_memory("my s3cret plan")
    assert b"my s3cret plan" in payloads.out_of_memory("my s3cret plan")


def test_the_prompt_is_the_last_message_or_the_first_input():
    """What the caller asked is found in both kinds of request, also in a message made of parts."""
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert payloads.prompt_of({"messages": messages}) == "u"
    assert payloads.prompt_of({"input": ["a", "b"]}) == "a"
    assert payloads.prompt_of({"input": []}) == "[]"
    assert payloads.prompt_of({"messages": [{"content": [{"type": "text", "text": "part"}]}]}) == "part"
    assert payloads.prompt_of({"messages": [{"content": None}]}) == "null"
    assert payloads.prompt_of({}) == ""


def test_a_text_body_can_quote_the_prompt_and_a_json_body_is_sent_as_such():
    """Scripted bodies are text or JSON."""
    assert payloads.filled("no room for {prompt}", "me") == b"no room for me"
    assert json.loads(payloads.filled({"error": {"code": 1}}, "me")) == {"error": {"code": 1}}


def test_metrics_have_the_present_names_and_labels():
    """The gauges are those of a present vLLM, with the model's name escaped."""
    lines = payloads.metrics('a"b', 2, 3, 0.5, old_names=False).decode().splitlines()

    assert r'vllm:num_requests_running{engine="0",model_name="a\"b"} 2.0' in lines
    assert r'vllm:num_requests_waiting{engine="0",model_name="a\"b"} 3.0' in lines
    assert r'vllm:num_requests_waiting_by_reason{engine="0",model_name="a\"b",reason="capacity"} 3.0' in lines
    assert r'vllm:kv_cache_usage_perc{engine="0",model_name="a\"b"} 0.5' in lines
    assert "# TYPE vllm:num_requests_running gauge" in lines


def test_metrics_can_have_the_old_names():
    """An old vLLM has another name for the cache, no engine label and no reasons."""
    text = payloads.metrics("m", 2, 3, 0.5, old_names=True).decode()

    assert 'vllm:gpu_cache_usage_perc{model_name="m"} 0.5' in text
    assert "engine" not in text
    assert "by_reason" not in text
    assert "kv_cache" not in text
