"""Compares the results of transformers' `generate` with a key/value cache with its results without a cache and
with moh-generate. Checks that an argument with a name unknown to the model's code is rejected."""

import importlib.util
import unittest
from pathlib import Path
from unittest import mock

# Must be first: it sets the environment of transformers.
from programs import NAMES, Models, code, load, random_ids, run

import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaModel

LENGTH = 12
PROMPT = "Once upon a time there was"
VERSION = rf"transformers {transformers.__version__}.*pip install"


def generate(model, ids, **options):
    """Returns the tokens that `model` adds to `ids`, always the same number."""
    fixed = {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **fixed, **options)[:, ids.shape[1] :]


def generate_continuously(model, prompts):
    """Returns the tokens that `model` adds to each prompt, in batches that mix prompts' and generated tokens."""
    options = {"max_new_tokens": LENGTH, "do_sample": False, "pad_token_id": 0}
    # No token ends a text.
    greedy = transformers.GenerationConfig(**options, eos_token_id=-1)
    # Batches have fewer tokens than the prompts. Without limits, the cache uses most of the memory.
    limits = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=20)
    answers = model.generate_batch(
        [prompt.tolist() for prompt in prompts],
        generation_config=greedy,
        continuous_batching_config=limits,
        progress_bar=False,
    )
    in_order = sorted(answers.values(), key=lambda answer: int(answer.request_id.rpartition("_")[2]))
    return [answer.generated_tokens for answer in in_order]


class Cached(Models):
    def setUp(self):
        super().setUp()
        self.loaded = {name: load(self.model(name)) for name in NAMES}

    def each(self):
        """Yields every model, with prompts and the tokens that it generates from them without a cache."""
        for name, model in self.loaded.items():
            with self.subTest(model=name):
                ids = random_ids(model, 4, 16)
                yield model, ids, generate(model, ids, use_cache=False)

    def test_a_cache_changes_no_token(self):
        for model, ids, expected in self.each():
            self.assertTrue(torch.equal(generate(model, ids), expected))
            self.assertTrue(torch.equal(generate(model, ids, cache_implementation="static"), expected))

    def test_continuous_batches_are_their_prompts_alone(self):
        for model, ids, _ in self.each():
            prompts = [row[:length] for row, length in zip(ids, [16, 3, 11, 7])]
            expected = [generate(model, prompt[None], use_cache=False)[0].tolist() for prompt in prompts]
            for attention in ["sdpa", "eager"]:
                other = load(self.model(self._subtest.params["model"]), attention)
                self.assertEqual(generate_continuously(other, prompts), expected)

    def test_a_step_is_one_graph(self):
        model = self.loaded["qwen3"]
        ids = random_ids(model, 1, 16)
        expected = generate(model, ids)
        graph = torch.compile(model.forward, backend="eager", fullgraph=True)
        with mock.patch.object(model, "forward", graph):
            found = generate(model, ids, cache_implementation="static", disable_compile=True)
        self.assertTrue(torch.equal(found, expected))

    def test_a_batch_with_padding_is_its_rows_alone(self):
        for model, ids, expected in self.each():
            padded, mask = ids.clone(), torch.ones_like(ids)
            for row, padding in enumerate([0, 3, 7, 15]):
                padded[row, :padding], mask[row, :padding] = 0, 0
            found = generate(model, padded, attention_mask=mask)
            for row, padding in enumerate([0, 3, 7, 15]):
                alone = generate(model, ids[row : row + 1, padding:], use_cache=False)
                self.assertTrue(torch.equal(found[row], alone[0]), f"row {row}")
            self.assertTrue(torch.equal(found[0], expected[0]))

    def test_beams_with_a_cache_are_those_without(self):
        for model, ids, _ in self.each():
            without = generate(model, ids[:2], num_beams=3, use_cache=False)
            self.assertTrue(torch.equal(generate(model, ids[:2], num_beams=3), without))

    def test_assisted_generation_is_greedy_generation(self):
        assistants = {"tied": "by-layer", "by-layer": "tied"}
        for model, ids, expected in self.each():
            name = self._subtest.params["model"]
            assistant = load(self.model(assistants.get(name, name)))
            row = ids[:1]
            self.assertTrue(torch.equal(generate(model, row, assistant_model=assistant), expected[:1]))
            # Text that repeats gives something to look up.
            row = row.repeat(1, 2)
            greedy = generate(model, row, use_cache=False)
            self.assertTrue(torch.equal(generate(model, row, prompt_lookup_num_tokens=3), greedy))

    def test_a_pipeline_gives_the_text_of_moh_generate(self):
        for name in ["tied", "by-layer"]:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.model(name), trust_remote_code=True)
            tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
            pipeline = transformers.pipeline("text-generation", model=self.loaded[name], tokenizer=tokenizer)
            # The tokenizer would also add the token that ends a text.
            options = {"max_new_tokens": LENGTH, "do_sample": False, "add_special_tokens": False}
            begin = tokenizer.bos_token
            theirs = pipeline([begin + PROMPT, begin + "The"], batch_size=2, **options)
            for prompt, result in zip([PROMPT, "The"], theirs):
                ours = run(
                    "moh-generate", "--model", self.model(name), "--prompt", prompt, "--max-tokens", LENGTH, "--dtype", "f32"
                )
                self.assertEqual(ours.strip(), result[0]["generated_text"].removeprefix(begin).strip())

    def test_the_cache_has_either_name(self):
        for model, ids, _ in self.each():
            for language_model in [model, model.model]:
                with torch.no_grad():
                    whole = language_model(ids, use_cache=False)[0]
                    for name in ["past_key_values", "cache"]:
                        first = language_model(ids[:, :9], use_cache=True)
                        rest = language_model(ids[:, 9:], **{name: first[code("modeling_moh_llama").CACHE]})
                        self.assertLess((whole[:, 9:] - rest[0]).abs().max().item(), 1e-4)
                caches = transformers.DynamicCache(), transformers.DynamicCache()
                with self.assertRaisesRegex(ValueError, "two names of one argument"):
                    model(ids, past_key_values=caches[0], cache=caches[1])


class OtherReleases(Models):
    """Layers that call attention as another release of transformers might."""

    def refused(self, error, message, **renamed):
        """Checks that generation fails when layers rename arguments, or omit them if the name is None."""

        def rename(_, arguments, keywords):
            kept = {renamed.get(name, name): value for name, value in keywords.items()}
            kept.pop(None, None)
            return arguments, kept

        for name in NAMES:
            with self.subTest(model=name, renamed=renamed):
                model = load(self.model(name))
                for layer in model.model.layers:
                    layer.self_attn.register_forward_pre_hook(rename, with_kwargs=True)
                ids, mask = random_ids(model, 2, 8), torch.ones(2, 8, dtype=torch.long)
                mask[0, :3] = 0
                with self.assertRaisesRegex(error, f"{message}.*{VERSION}"):
                    generate(model, ids, attention_mask=mask)

    def test_a_cache_mask_or_positions_by_another_name_are_refused(self):
        cache = code("modeling_moh_llama").CACHE
        self.refused(TypeError, "no argument `kv`, a DynamicCache", **{cache: "kv"})
        self.refused(TypeError, "no argument `token_type_ids`, a DynamicCache", **{cache: "token_type_ids"})
        self.refused(TypeError, "no argument `mask`, a Tensor", attention_mask="mask")
        self.refused(TypeError, "no argument `rotary`, a tuple", position_embeddings="rotary")

    def test_a_cache_that_attention_does_not_get_is_an_error(self):
        cache = code("modeling_moh_llama").CACHE
        self.refused(RuntimeError, "its attention was given none", **{cache: None})
        self.refused(RuntimeError, "no layer has written", **{cache: None, "use_cache": None})

    def test_a_body_whose_cache_has_another_name_is_not_imported(self):
        code("modeling_moh_llama")
        path = Path(__file__).with_name("modeling_moh_llama.py")
        spec = importlib.util.spec_from_file_location("moh_hf.of_another_release", path)
        with mock.patch.object(LlamaModel, "forward", lambda self, input_ids=None, kv=None, **kwargs: None):
            with self.assertRaisesRegex(ImportError, f"a name that this code does not know.*{VERSION}"):
                spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def test_numbers_flags_and_arguments_of_the_attention_function_pass(self):
        def weighted(module, query, key, value, attention_mask, weight=None, **kwargs):
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
            return out * (1 if weight is None else weight), None

        transformers.AttentionInterface.register("weighted", weighted)
        transformers.AttentionMaskInterface.register(
            "weighted", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        )
        model = load(self.model("qwen3"), "weighted")
        ids, weight = random_ids(model, 1, 8), torch.tensor(2.0)
        with torch.no_grad():
            plain = model(ids, token_type_ids=torch.zeros_like(ids), some_flag=True).logits
            self.assertFalse(torch.equal(model(ids, weight=weight).logits, plain))
        with self.assertRaisesRegex(TypeError, "no argument `weight`, a Tensor"):
            load(self.model("qwen3"))(ids, weight=weight)


if __name__ == "__main__":
    unittest.main()
