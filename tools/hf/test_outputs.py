"""Compares the results of transformers with a Mixture-of-Head model with this repository's programs."""

import json
import unittest

from programs import (  # Must be first: it sets the environment of transformers.
    FIXTURES,
    NAMES,
    ROUTERS,
    Models,
    code,
    convert,
    load,
    our_logits,
    random_ids,
    run,
)

import torch
import transformers
from safetensors.torch import load_file

# Both sides add in f32 in another order.
TOLERANCE = 1e-4
CACHE = code("modeling_moh_llama").CACHE


class Outputs(Models):
    def check_logits(self, ours, theirs):
        self.assertEqual(ours.shape, theirs.shape)
        self.assertLess((ours - theirs).abs().max().item(), TOLERANCE)

    def test_logits_and_selected_heads_are_those_of_moh_eval(self):
        for name in [*NAMES, *ROUTERS]:
            for attention in ["sdpa", "eager"]:
                with self.subTest(model=name, attention=attention):
                    model = load(self.model(name), attention)
                    ids = random_ids(model, 3, 41)
                    logits, masks = our_logits(self.model(name), ids, self.scratch)
                    with torch.no_grad():
                        out = model(ids, output_router_logits=True)
                    self.check_logits(logits, out.logits)
                    # Without a router no head is selected.
                    none = [torch.zeros_like(mask, dtype=torch.bool) for mask in masks]
                    selected = none if name == "static" else out.selected_heads
                    self.assertEqual((len(masks), name == "static"), (len(selected), not out.selected_heads))
                    for ours, theirs in zip(masks, selected):
                        self.assertTrue(torch.equal(ours.bool(), theirs))

    def test_a_cache_changes_nothing(self):
        for name in NAMES:
            model = load(self.model(name))
            ids = random_ids(model, 2, 24)
            logits, _ = our_logits(self.model(name), ids, self.scratch)
            cache, parts = None, []
            with torch.no_grad():
                for part in ids.split([10, 1, 1, 5, 7], dim=1):
                    out = model(part, use_cache=True, **{CACHE: cache})
                    cache = out[CACHE]
                    parts.append(out.logits)
            self.check_logits(logits, torch.cat(parts, 1))

    def test_padding_on_either_side_changes_nothing(self):
        for attention in ["sdpa", "eager"]:
            for name in NAMES:
                model = load(self.model(name), attention)
                ids = random_ids(model, 1, 20)
                logits, _ = our_logits(self.model(name), ids, self.scratch)
                padding = random_ids(model, 1, 6, seed=2)
                ones, zeros = torch.ones_like(ids), torch.zeros_like(padding)
                with torch.no_grad():
                    right = model(torch.cat([ids, padding], 1), attention_mask=torch.cat([ones, zeros], 1))
                    mask = torch.cat([zeros, ones], 1)
                    positions = (mask.cumsum(1) - 1).clamp(min=0)
                    left = model(torch.cat([padding, ids], 1), attention_mask=mask, position_ids=positions)
                self.check_logits(logits, right.logits[:, :20])
                self.check_logits(logits, left.logits[:, 6:])

    def test_generate_gives_the_tokens_of_moh_generate(self):
        for name in ["tied", "by-layer"]:
            directory, prompt = self.model(name), "Once upon a time there was"
            options = ("--prompt", prompt, "--max-tokens", 40, "--dtype", "f32")
            ours = run("moh-generate", "--model", directory, *options)
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=True)
            ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
            if ids[0, -1] == tokenizer.eos_token_id:
                ids = ids[:, :-1]
            model = load(directory)
            # Two equal sequences. The second is padded on the left.
            padded = torch.cat([torch.full((1, 3), tokenizer.eos_token_id), ids], 1)
            mask = torch.cat([torch.zeros(1, 3), torch.ones(ids.shape)], 1).long()
            for ids, mask in [(ids, None), (padded, mask)]:
                mask = torch.ones_like(ids) if mask is None else mask
                out = model.generate(
                    ids, attention_mask=mask, max_new_tokens=40, do_sample=False, pad_token_id=tokenizer.eos_token_id
                )
                theirs = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
                self.assertGreater(len(theirs), 40)
                self.assertEqual(ours.strip(), (prompt + theirs).strip())

    def test_all_heads_active_is_the_dense_model(self):
        model = load(self.model("untied"), moh_shared_heads=3, moh_routed_top_k=5)
        dense = transformers.AutoModelForCausalLM.from_pretrained(self.root / "llama", dtype=torch.float32)
        ids = random_ids(model, 2, 24)
        with torch.no_grad():
            self.assertTrue(torch.equal(model(ids).logits, dense(ids).logits))

    def test_the_last_logits_alone(self):
        model = load(self.model("tied"))
        ids = random_ids(model, 2, 12)
        with torch.no_grad():
            whole = model(ids).logits
            self.assertTrue(torch.allclose(model(ids, logits_to_keep=2).logits, whole[:, -2:], atol=1e-5))
            kept = model(ids, logits_to_keep=torch.tensor([0, 5])).logits
            self.assertTrue(torch.allclose(kept, whole[:, [0, 5]], atol=1e-5))

    def test_hidden_states_and_attentions_are_recorded(self):
        model = load(self.model("qwen3"), "eager")
        out = model(random_ids(model, 1, 9), output_hidden_states=True, output_attentions=True)
        self.assertEqual((len(out.hidden_states), len(out.attentions)), (3, 2))
        self.assertEqual(out.attentions[0].shape, (1, 8, 9, 9))
        self.assertIsNone(out.aux_loss)

    def test_the_function_of_a_server_may_return_flat_heads(self):
        def flat(module, query, key, value, attention_mask, **kwargs):
            from transformers.integrations.sdpa_attention import sdpa_attention_forward

            out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
            return out.reshape(-1, query.shape[1] * query.shape[3]), None

        transformers.AttentionInterface.register("flat", flat)
        transformers.AttentionMaskInterface.register(
            "flat", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        )
        for name in NAMES:
            model, server = load(self.model(name)), load(self.model(name), "flat")
            ids = random_ids(model, 1, 24)
            with torch.no_grad():
                self.assertTrue(torch.equal(model(ids).logits, server(ids).logits))


class Saved(Models):
    def test_a_saved_model_is_loaded_and_converted_again(self):
        for name in [*NAMES, *ROUTERS]:
            with self.subTest(model=name):
                model = load(self.model(name))
                saved = self.scratch / name
                model.save_pretrained(saved)
                again_at = self.scratch / f"{name}-again"
                again = load(saved)
                ids = random_ids(model, 2, 24)
                with torch.no_grad():
                    self.assertTrue(torch.equal(model(ids).logits, again(ids).logits))
                auto_map = json.loads((saved / "config.json").read_text())["auto_map"]
                self.assertEqual(set(auto_map), {"AutoConfig", "AutoModel", "AutoModelForCausalLM"})
                for reference in auto_map.values():
                    self.assertTrue((saved / f"{reference.split('.')[0]}.py").is_file())
                ours, masks = our_logits(convert(saved, again_at), ids, self.scratch)
                before, masks_before = our_logits(self.model(name), ids, self.scratch)
                self.assertTrue(torch.equal(ours, before))
                self.assertTrue(all(map(torch.equal, masks, masks_before)))
                # The output replaces itself, with its code and its card.
                convert(self.model(name), again_at, "--force")
                dense = convert(again_at, self.scratch / f"{name}-dense", "--attention", "dense")
                self.assertEqual(list(dense.glob("*.py")) + list(dense.glob("README.md")), [])

    def test_the_base_model_is_loaded_by_its_auto_class(self):
        for name in NAMES:
            body = transformers.AutoModel.from_pretrained(self.model(name), trust_remote_code=True)
            self.assertIn("layers.0.self_attn.q_proj.weight", body.state_dict())
            self.assertTrue(type(body).__name__.startswith("Moh"))


@unittest.skipUnless(FIXTURES.is_dir(), "skipped: no fixtures")
class Fixtures(Models):
    def test_outputs_and_gradients_are_those_of_an_independent_reference(self):
        for vector in json.loads((FIXTURES / "vectors" / "manifest.json").read_text())["vectors"]:
            with self.subTest(vector=vector["name"]):
                tensors = load_file(FIXTURES / "vectors" / vector["file"])
                source = (FIXTURES / "vectors" / vector["model"]).resolve()
                heads = ["--shared-heads", vector["shared"], "--routed-top-k", vector["routed_top_k"]]
                model = load(convert(source, self.scratch / vector["name"], *heads)).train()
                ids = tensors["input_ids"]
                out = model(ids, labels=ids, output_router_logits=True)
                self.assertLess((out.logits - tensors["moh_logits"]).abs().max().item(), TOLERANCE)
                self.assertTrue(torch.equal(torch.stack(out.selected_heads), tensors["mask"].bool()))
                ce, balance, total = tensors["scalars"][1:].tolist()
                self.assertAlmostEqual(out.aux_loss.item(), balance, places=5)
                self.assertAlmostEqual(out.loss.item(), total, places=5)
                out.loss.backward()
                for name, parameter in model.named_parameters():
                    expected = tensors[f"grad.{name}"]
                    error = (parameter.grad - expected).norm() / expected.norm()
                    self.assertLess(error.item(), 1e-4, name)


if __name__ == "__main__":
    unittest.main()
