"""Compares gradients of Mixture-of-Head models in transformers with moh-train's, and tests common ways of
fine-tuning."""

import unittest

# Must be first: it sets the environment of transformers.
from programs import BALANCE, NAMES, ROUTERS, Models, convert, load, our_logits, random_ids, train_one_step

import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import cross_entropy

# Relative to the norm of the gradient. Both sides add in f32 in another order.
GRADIENT_TOLERANCE = 1e-4


def windows_of(ids):
    """Returns windows, each starting with the last token of the previous window."""
    batch, length = ids.shape
    flat = torch.cat([ids.flatten(), ids[0, :1]])
    return torch.stack([flat[row * length :][: length + 1] for row in range(batch)])


def loss_of(model, windows):
    """Returns the loss of moh-train: windows have a target for each of their inputs."""
    out = model(windows[:, :-1], output_router_logits=True)
    ce = cross_entropy(out.logits.flatten(0, 1), windows[:, 1:].flatten())
    return ce, out.aux_loss


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def train(trainer):
    """Trains, and returns the losses of the steps."""
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class Gradients(Models):
    def assert_close(self, ours, theirs):
        self.assertEqual(set(ours), set(theirs))
        for name, gradient in ours.items():
            error = (gradient - theirs[name]).norm() / gradient.norm()
            self.assertLess(error.item(), GRADIENT_TOLERANCE, name)

    def test_a_step_has_the_losses_and_gradients_of_moh_train(self):
        for name in [*NAMES, *ROUTERS]:
            with self.subTest(model=name):
                model = load(self.model(name)).train()
                windows = windows_of(random_ids(model, 2, 32))
                metrics, ours = train_one_step(self.model(name), windows, self.scratch)
                ce, balance = loss_of(model, windows)
                self.assertEqual([balance is None, metrics["balance_loss"] is None], [name == "static"] * 2)
                total = ce if balance is None else ce + BALANCE * balance
                total.backward()
                self.assertAlmostEqual(ce.item(), metrics["loss"], places=5)
                if balance is not None:
                    self.assertAlmostEqual(balance.item(), metrics["balance_loss"], places=5)
                theirs = gradients(model)
                self.assert_close(ours, theirs)
                norm = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
                self.assertLess(abs(norm.item() / metrics["grad_norm"] - 1), GRADIENT_TOLERANCE)
                if balance is None:
                    continue
                # The straight-through path is part of it.
                model.zero_grad()
                for layer in model.model.layers:
                    if layer.self_attn.router is not None:
                        layer.self_attn.router.register_forward_hook(
                            lambda _, __, out: (out[0].detach(), *out[1:])
                        )
                ce, balance = loss_of(model, windows)
                (ce + BALANCE * balance).backward()
                # A learned router passes the gradient to the previous blocks.
                learned = name in ("linear", "one-stage", "two-stage")
                query = f"model.layers.{0 if learned else 1}.self_attn.q_proj.weight"
                error = (gradients(model)[query] - ours[query]).norm() / ours[query].norm()
                # Two routed heads have constant gates.
                self.assertGreater(error.item(), 10 * GRADIENT_TOLERANCE)

    def test_checkpointing_changes_no_gradient(self):
        for name in NAMES:
            model = load(self.model(name)).train()
            ids = random_ids(model, 2, 24)
            results = []
            for checkpoint in [False, True]:
                if checkpoint:
                    options = {"use_reentrant": False}
                    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
                model.zero_grad()
                model(ids, labels=ids, output_router_logits=True, use_cache=False).loss.backward()
                results.append({key: gradient.clone() for key, gradient in gradients(model).items()})
            self.assert_close(*results)

    def test_reentrant_checkpointing_with_the_balance_loss_is_refused(self):
        model = load(self.model("tied")).train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        ids = random_ids(model, 2, 24)
        model(ids, labels=ids, use_cache=False).loss.backward()
        with self.assertRaisesRegex(ValueError, "use_reentrant"):
            model(ids, labels=ids, output_router_logits=True, use_cache=False)

    def test_bf16_has_the_gradients_of_f32(self):
        # First ids with tokens that select the same heads: near ties select differently in bf16.
        for seed in range(1, 9):
            models = [load(self.model("qwen3"), dtype=dtype).train() for dtype in (torch.float32, torch.bfloat16)]
            ids = random_ids(models[0], 2, 24, seed=seed)
            exact, rounded = (model(ids, labels=ids, output_router_logits=True) for model in models)
            if all(map(torch.equal, exact.selected_heads, rounded.selected_heads)):
                break
        else:
            self.fail("no ids whose tokens select the same heads")
        exact.loss.backward()
        rounded.loss.backward()
        found = gradients(models[1])
        for name, expected in gradients(models[0]).items():
            self.assertLess((found[name].float() - expected).norm().item(), 0.08 * expected.norm().item(), name)


class BalanceLoss(Models):
    def test_padding_does_not_count(self):
        for name in NAMES:
            model = load(self.model(name)).train()
            ids, padding = random_ids(model, 2, 20), random_ids(model, 2, 5, seed=3)
            ones, zeros = torch.ones_like(ids), torch.zeros_like(padding)
            expected = model(ids, output_router_logits=True).aux_loss.item()
            right = torch.cat([ids, padding], 1), torch.cat([ones, zeros], 1)
            left = torch.cat([padding, ids], 1), torch.cat([zeros, ones], 1)
            for padded, mask in [right, left]:
                positions = (mask.cumsum(1) - 1).clamp(min=0)
                options = {"attention_mask": mask, "position_ids": positions}
                found = model(padded, output_router_logits=True, **options).aux_loss.item()
                self.assertAlmostEqual(found, expected, places=5)
                self.assertNotAlmostEqual(model(padded, output_router_logits=True).aux_loss.item(), found, places=5)

    def test_it_is_weighted_and_optional(self):
        model = load(self.model("untied"), router_aux_loss_coef=0.5).train()
        ids = random_ids(model, 2, 24)
        plain, balanced = model(ids, labels=ids), model(ids, labels=ids, output_router_logits=True)
        self.assertIsNone(plain.aux_loss)
        self.assertAlmostEqual(balanced.loss.item(), (plain.loss + 0.5 * balanced.aux_loss).item(), places=5)
        self.assertEqual(load(self.model("untied")).config.router_aux_loss_coef, 0.01)
        # The micro-batches of a step add up to a weight of one.
        targets = 2 * 23
        parts = sum(
            model(row, labels=row, output_router_logits=True, num_items_in_batch=targets).loss for row in ids.split(1)
        )
        mean = sum(model(row, labels=row, output_router_logits=True).loss for row in ids.split(1)) / 2
        self.assertAlmostEqual(parts.item(), mean.item(), places=5)

    def test_a_mask_that_hides_the_padding_is_refused(self):
        model = load(self.model("tied"))
        ids = random_ids(model, 1, 6)
        mask = torch.zeros(1, 1, 6, 6)
        model(ids, attention_mask=mask)
        self.assertIsNone(model(ids, attention_mask=mask, output_router_logits=True).aux_loss)
        with self.assertRaisesRegex(ValueError, "attention_mask of shape"):
            model(ids, labels=ids, attention_mask=mask, output_router_logits=True)

    def test_a_model_with_the_loss_generates_with_a_static_cache(self):
        for name in NAMES:
            model = load(self.model(name))
            ids = random_ids(model, 1, 6)
            options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            expected = model.generate(ids, **options)
            model.config.output_router_logits = True
            found = model.generate(ids, cache_implementation="static", disable_compile=True, **options)
            self.assertTrue(torch.equal(found, expected), name)


class FineTuning(Models):
    def test_a_plain_loop_reduces_the_loss(self):
        for name in NAMES:
            model = load(self.model(name)).train()
            model.config.output_router_logits = True
            ids = random_ids(model, 4, 24)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
            losses = []
            for _ in range(8):
                loss = model(ids, labels=ids).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            self.assertLess(losses[-1], 0.8 * losses[0])

    def test_trainer_accumulates_checkpoints_and_saves(self):
        model = load(self.model("by-layer"))
        model.config.output_router_logits = True
        rows = [{"input_ids": row, "labels": row} for row in random_ids(model, 8, 24)]
        arguments = transformers.TrainingArguments(
            self.scratch / "trainer",
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            learning_rate=3e-3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            log_level="error",
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        losses = train(trainer)
        self.assertLess(losses[-1], 0.9 * losses[0])
        trained = load(self.scratch / "trainer" / "checkpoint-6")
        ids = random_ids(model, 1, 12)
        with torch.no_grad():
            self.assertTrue(torch.allclose(trained(ids).logits, trainer.model.eval()(ids).logits, atol=1e-5))

    def test_trainer_trains_an_adapter_that_is_loaded_and_merged(self):
        for name in ["tied", "qwen3"]:
            base = load(self.model(name))
            base.config.output_router_logits = True
            rows = [{"input_ids": row, "labels": row} for row in random_ids(base, 8, 24)]
            adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4)
            model = get_peft_model(base, adapter)
            arguments = transformers.TrainingArguments(
                self.scratch / "trainer",
                max_steps=5,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                log_level="error",
            )
            trainer = transformers.Trainer(model, arguments, train_dataset=rows)
            losses = train(trainer)
            self.assertLess(losses[-1], losses[0])
            trainer.save_model(self.scratch / f"{name}-adapter")
            again = PeftModel.from_pretrained(load(self.model(name)), self.scratch / f"{name}-adapter").eval()
            ids = random_ids(base, 2, 12)
            with torch.no_grad():
                trained = model.eval()(input_ids=ids).logits
                self.assertTrue(torch.equal(again(input_ids=ids).logits, trained))
                self.assertGreater((load(self.model(name))(ids).logits - trained).abs().max().item(), 0.01)
            again.merge_and_unload().save_pretrained(self.scratch / f"{name}-merged")
            converted = convert(self.scratch / f"{name}-merged", self.scratch / f"{name}-converted")
            logits, _ = our_logits(converted, ids, self.scratch)
            self.assertLess((logits - trained).abs().max().item(), 1e-4)

    def test_a_lora_adapter_trains_alone(self):
        for name in NAMES:
            base = load(self.model(name))
            ids = random_ids(base, 2, 24)
            adapter = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4)
            model = get_peft_model(base, adapter).train()
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            losses = []
            for _ in range(5):
                loss = model(input_ids=ids, labels=ids, output_router_logits=True).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            self.assertLess(losses[-1], losses[0])
            merged = model.eval().merge_and_unload()
            self.assertTrue(type(merged).__name__.startswith("Moh"))


if __name__ == "__main__":
    unittest.main()
