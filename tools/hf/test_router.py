"""Tests of the router and the configuration, without this repository's programs."""

import ast
import inspect
import sys
import textwrap
import unittest
from unittest import mock

# Must be first: it sets the environment of transformers.
from programs import REPOSITORY, VOCABULARY, code

import torch

llama, qwen3 = code("modeling_moh_llama"), code("modeling_moh_qwen3")
MohLlamaConfig, MohQwen3Config = llama.MohLlamaConfig, qwen3.MohQwen3Config


def config(**changes):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    counts = {"moh_shared_heads": 4, "moh_routed_top_k": 2}
    return MohLlamaConfig(**{**sizes, **counts, **changes}, vocab_size=VOCABULARY, intermediate_size=32)


class Router(unittest.TestCase):
    def router(self, heads, top_k):
        """Returns a router without shared heads."""
        counts = {"moh_shared_heads": 0, "moh_routed_top_k": top_k}
        return llama.MohRouter(config(num_attention_heads=heads, num_key_value_heads=1, **counts), 0)

    def route(self, norms, top_k=2, dtype=torch.float32):
        """Routes a token with these norms of its queries and without shared heads."""
        queries = torch.zeros(1, 1, len(norms), 4, dtype=dtype)
        queries[..., 0] = torch.tensor(norms)
        queries.requires_grad_()
        weights, scores, selected = self.router(len(norms), top_k)(queries, None)
        return queries, weights, scores, selected[0, 0].tolist()

    def test_the_gates_are_a_softmax_of_norms_over_their_deviation(self):
        _, weights, scores, selected = self.route([1.0, 4.0, 2.0, 3.0])
        # numpy.std([1, 4, 2, 3], ddof=1) is 1.2909944487358056
        expected = torch.tensor([1.0, 4.0, 2.0, 3.0]) / 1.2909944487358056
        self.assertTrue(torch.allclose(scores[0, 0], expected))
        self.assertEqual(selected, [False, True, False, True])
        self.assertEqual(weights[0, 0].tolist(), [0, 1, 0, 1])

    def test_a_tie_goes_to_the_lower_head(self):
        self.assertEqual(self.route([2.0, 3.0, 2.0, 2.0])[3], [True, True, False, False])
        self.assertEqual(self.route([1.0] * 8)[3], [True] * 2 + [False] * 6)

    def test_squares_are_compared_in_f64(self):
        # In f32 both squares are 2^24.
        queries = torch.zeros(1, 1, 3, 2)
        queries[0, 0, 1] = torch.tensor([4096.0, 0.0])
        queries[0, 0, 2] = torch.tensor([4096.0, 0.5])
        self.assertEqual(self.router(3, 1)(queries, None)[2][0, 0].tolist(), [False, False, True])

    def test_equal_norms_have_uniform_gates_and_no_gradient(self):
        for norm in [0.0, 0.1, 3.0]:
            queries, weights, scores, _ = self.route([norm] * 3)
            self.assertEqual(scores[0, 0].tolist(), [0, 0, 0])
            (weights * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
            self.assertEqual(queries.grad.abs().max().item(), 0)

    def test_a_query_of_zero_has_no_gradient(self):
        queries, weights, _, _ = self.route([0.0, 1.0, 3.0])
        (weights * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        self.assertTrue(queries.grad.isfinite().all())
        self.assertEqual(queries.grad[0, 0, 0].abs().max().item(), 0)
        self.assertGreater(queries.grad.abs().max().item(), 0)

    def test_only_selected_heads_pass_a_gradient(self):
        def gradient(factors):
            queries, weights, _, _ = self.route([1.0, 4.0, 2.0, 3.0])
            (weights * torch.tensor(factors)).sum().backward()
            return queries.grad

        self.assertTrue(torch.equal(gradient([5.0, 1.0, 7.0, 2.0]), gradient([0.0, 1.0, 0.0, 2.0])))
        self.assertFalse(torch.equal(gradient([0.0, 1.0, 0.0, 2.0]), gradient([0.0, 2.0, 0.0, 2.0])))

    def test_weights_are_exactly_one(self):
        torch.manual_seed(0)
        weights, _, selected = llama.MohRouter(config(), 0)(torch.randn(3, 50, 8, 8), None)
        self.assertEqual(set(weights.unique().tolist()), {0.0, 1.0})
        self.assertTrue((weights[..., :4] == 1).all())
        self.assertTrue(torch.equal(weights[..., 4:] == 1, selected))

    def test_no_routed_head_may_be_selected(self):
        weights, _, selected = llama.MohRouter(config(moh_routed_top_k=0), 0)(torch.randn(1, 5, 8, 8), None)
        self.assertFalse(selected.any())
        self.assertEqual(weights.sum(-1).tolist(), [[4] * 5])

    def test_whole_groups_are_selected_by_their_squares(self):
        groups = config(moh_router="group", num_key_value_heads=4, moh_shared_heads=2, moh_routed_top_k=4)
        norms = torch.tensor([9.0, 9.0, 3.0, 1.0, 2.0, 2.0, 0.0, 3.0])
        queries = torch.zeros(1, 1, 8, 4)
        queries[..., 2] = norms
        queries.requires_grad_()
        weights, scores, selected = llama.MohRouter(groups, 0)(queries, None)
        # Squares of the routed groups: 10, 8 and 9.
        self.assertEqual(weights[0, 0].tolist(), [1, 1, 1, 1, 0, 0, 1, 1])
        self.assertEqual(selected[0, 0].tolist(), [True, True, False, False, True, True])
        expected = torch.tensor([5.0, 5.0, 4.0, 4.0, 4.5, 4.5]).sqrt()
        self.assertTrue(torch.allclose(scores[0, 0], expected))
        (weights * torch.arange(8.0)).sum().backward()
        self.assertGreater(queries.grad[0, 0, 4].abs().max().item(), 0)
        self.assertEqual(queries.grad[0, 0, :2].abs().max().item(), 0)

    def test_equal_logits_weigh_every_active_head_by_one(self):
        ids = [[1, 6], [0, 1]]
        learned = config(moh_router="two-stage", moh_shared_head_ids=ids, moh_routed_top_k=3)
        router = llama.MohLogitRouter(learned, 0)
        torch.nn.init.zeros_(router.stages.weight)
        weights, scores, selected = router(torch.randn(1, 5, 8, 8), torch.randn(1, 5, 64))
        self.assertEqual(weights[0].tolist(), [[1, 1, 1, 1, 0, 0, 1, 0]] * 5)
        self.assertEqual((scores.abs().max().item(), selected.sum(-1).tolist()), (0, [[3] * 5]))

    def test_two_stages_share_a_weight_of_two(self):
        torch.manual_seed(0)
        learned = config(moh_router="two-stage", moh_shared_heads=3, moh_routed_top_k=2)
        router = llama.MohLogitRouter(learned, 0)
        torch.nn.init.normal_(router.weight, std=0.3)
        weights, _, selected = router(torch.randn(2, 5, 8, 8), torch.randn(2, 5, 64))
        shared, routed = weights[..., :3].sum(-1) / 3, weights[..., 3:].sum(-1) / 2
        self.assertTrue(torch.allclose(shared + routed, torch.full((2, 5), 2.0)))
        self.assertTrue(torch.equal(weights[..., 3:] > 0, selected))

    def test_one_stage_keeps_the_weights_of_each_kind_apart(self):
        torch.manual_seed(0)
        learned = config(moh_router="one-stage", moh_shared_heads=3, moh_routed_top_k=2)
        router = llama.MohLogitRouter(learned, 0)
        torch.nn.init.normal_(router.weight, std=0.3)
        weights, _, selected = router(torch.randn(2, 5, 8, 8), torch.randn(2, 5, 64))
        self.assertTrue(torch.allclose(weights[..., :3].sum(-1), torch.full((2, 5), 3.0)))
        self.assertTrue(torch.allclose(weights[..., 3:].sum(-1), torch.full((2, 5), 2.0)))
        self.assertTrue(torch.equal(weights[..., 3:] > 0, selected))
        self.assertEqual([name for name, _ in router.named_parameters()], ["weight"])

    def test_a_linear_router_passes_its_gradient_straight_through(self):
        torch.manual_seed(0)
        router = llama.MohLogitRouter(config(moh_router="linear"), 0)
        torch.nn.init.normal_(router.weight, std=0.3)
        hidden = torch.randn(2, 5, 64, requires_grad=True)
        weights, _, selected = router(torch.randn(2, 5, 8, 8), hidden)
        self.assertEqual(set(weights.unique().tolist()), {0.0, 1.0})
        self.assertTrue(torch.equal(weights[..., 4:] == 1, selected))
        (weights * torch.arange(8.0)).sum().backward()
        self.assertEqual(router.weight.grad[:4].abs().max().item(), 0)
        self.assertTrue(router.weight.grad[4:].abs().max() > 0 and hidden.grad.abs().max() > 0)

    def test_a_layer_without_a_router_has_its_shared_heads(self):
        static = config(moh_router="static", moh_shared_head_ids=[[1, 6], [0]], moh_routed_top_k=0)
        model = llama.MohLlamaForCausalLM(static)
        router = model.model.layers[0].self_attn.router
        self.assertEqual(router(torch.randn(1, 5, 8, 8), None)[0].tolist(), [0, 1, 0, 0, 0, 0, 1, 0])
        ids = torch.arange(6)[None] % VOCABULARY
        outputs = model(ids, labels=ids, output_router_logits=True)
        self.assertIsNone(outputs.aux_loss)
        outputs.loss.backward()
        queries = model.model.layers[0].self_attn.q_proj.weight.grad.unflatten(0, (8, 8))
        moved = [head for head in range(8) if queries[head].abs().max() > 0]
        self.assertEqual(moved, [1, 6])

    def test_a_part_of_the_heads_is_refused(self):
        with self.assertRaisesRegex(NotImplementedError, "4 of 8 heads .* tensor-parallel size of 1"):
            llama.MohRouter(config(), 0)(torch.randn(1, 5, 4, 8), None)


class Configuration(unittest.TestCase):
    def refused(self, **changes):
        with self.assertRaises(ValueError) as caught:
            config(**changes)
        return str(caught.exception)

    def test_counts_that_cannot_be_routed_are_refused(self):
        for changes, message in [
            ({"moh_router": "learned"}, "moh_router = 'learned': unknown router"),
            ({"moh_router": None}, "moh_router = None: unknown router"),
            ({"moh_shared_heads": 9}, "the shared heads of layer 0 are [0, 1, 2, 3, 4, 5, 6, 7, 8]: the model has 8"),
            ({"moh_shared_heads": -1}, "moh_shared_heads of layer 0 = -1"),
            ({"moh_shared_heads": [4, 7]}, "moh_shared_heads of layer 1 = 7 of 8 leaves one routed head"),
            ({"moh_shared_heads": [4]}, "moh_shared_heads has 1 entries, and the model 2 layers"),
            ({"moh_shared_heads": 4.0}, "moh_shared_heads = 4.0: expected a whole number"),
            ({"moh_shared_heads": True}, "moh_shared_heads = True: expected a whole number"),
            ({"moh_shared_heads": [4, "4"]}, "moh_shared_heads = '4': expected a whole number"),
            ({"moh_shared_heads": None}, "moh_shared_heads = None: expected a whole number"),
            ({"moh_routed_top_k": 5}, "moh_routed_top_k of layer 0 = 5: must be from 0 to the 4"),
            ({"moh_routed_top_k": [2, -1]}, "moh_routed_top_k of layer 1 = -1"),
            ({"moh_shared_heads": [8, 0], "moh_routed_top_k": 0}, "of layer 1 are 0: no head"),
            ({"num_key_value_heads": 3}, "num_attention_heads = 8: must be a multiple of"),
            ({"moh_router": "group", "moh_shared_heads": 2}, "moh_shared_heads of layer 0 are no whole groups"),
            ({"moh_router": "group"}, "moh_routed_top_k of layer 0 = 2: must be a multiple of 4"),
            ({"moh_router": "static"}, "moh_routed_top_k of layer 0 = 2: must be 0"),
            ({"moh_router": "two-stage", "moh_routed_top_k": 0}, 'moh_routed_top_k of layer 0 = 0: the router "two-'),
            ({"moh_router": "one-stage", "moh_routed_top_k": 0}, 'moh_routed_top_k of layer 0 = 0: the router "one-'),
        ]:
            self.assertTrue(message in self.refused(**changes), self.refused(**changes))

    def test_counts_changed_later_are_checked_by_the_model(self):
        changed = config()
        changed.moh_routed_top_k = 5
        with self.assertRaisesRegex(ValueError, "moh_routed_top_k of layer 0 = 5"):
            llama.MohLlamaForCausalLM(changed)

    def test_a_file_without_counts_is_refused(self):
        fields = config().to_dict()
        self.assertEqual(MohLlamaConfig.from_dict(fields).layer_heads(1), ([0, 1, 2, 3], 2))
        for key in ["moh_router", "moh_shared_heads", "moh_routed_top_k"]:
            with self.assertRaisesRegex(ValueError, f"{key} is missing"):
                MohLlamaConfig.from_dict({name: value for name, value in fields.items() if name != key})

    def test_any_heads_may_be_shared(self):
        ids = {"moh_shared_head_ids": [[5, 0], [2]], "moh_routed_top_k": 3}
        given = config(**ids)
        self.assertEqual((given.layer_heads(0), given.layer_heads(1)), (([0, 5], 3), ([2], 3)))
        written = given.to_dict()
        # moh-train and the other programs read one of the two keys.
        self.assertIsNone(written["moh_shared_heads"])
        self.assertEqual(MohLlamaConfig.from_dict(written).layer_heads(0), ([0, 5], 3))
        self.assertEqual(MohLlamaConfig.from_dict(written, moh_shared_heads=4).layer_heads(0)[0], [0, 1, 2, 3])
        weights, _, selected = llama.MohRouter(given, 0)(torch.randn(3, 50, 8, 8), None)
        self.assertTrue((weights[..., [0, 5]] == 1).all())
        self.assertTrue(torch.equal(weights[..., [1, 2, 3, 4, 6, 7]] == 1, selected))
        for ids, message in [
            ([[0]], "moh_shared_head_ids has 1 entries, and the model 2 layers"),
            ([[0], [3, 3]], "moh_shared_head_ids of layer 1 = [3, 3]: must name each head once"),
            ([[0], [-1]], "moh_shared_head_ids of layer 1 = [-1]: must name each head once, from 0"),
            ([[0], [8]], "the shared heads of layer 1 are [8]: the model has 8 heads"),
        ]:
            self.assertIn(message, self.refused(moh_shared_head_ids=ids))

    def test_layers_may_differ(self):
        counts = {"moh_shared_heads": [8, 2], "moh_routed_top_k": [0, 3]}
        model = llama.MohLlamaForCausalLM(config(**counts))
        routers = [layer.self_attn.router for layer in model.model.layers]
        self.assertIsNone(routers[0])
        self.assertEqual((routers[1].routed_heads, routers[1].top_k), ([2, 3, 4, 5, 6, 7], 3))
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
        self.assertEqual(MohQwen3Config(**sizes, **counts).layer_heads(1), ([0, 1], 3))

    def test_an_older_transformers_is_an_import_error(self):
        source = (REPOSITORY / "tools" / "hf" / "configuration_moh_llama.py").read_text()
        # A lazy import may have replaced this file's module.
        with mock.patch.object(sys.modules["transformers"], "__version__", "4.57.1"):
            with self.assertRaisesRegex(ImportError, "need transformers 5.* this is 4.57.1"):
                exec(compile(source, "configuration_moh_llama.py", "exec"), {"__name__": "configuration"})


class ServerBackend(unittest.TestCase):
    """The requirements of vLLM's and SGLang's transformers backends on the code of a model."""

    ATTENTION = [llama.MohLlamaAttention, qwen3.MohQwen3Attention]

    def forward(self, attention):
        return ast.parse(textwrap.dedent(inspect.getsource(attention.forward))).body[0]

    def test_the_attention_function_is_called_once_by_a_local_name(self):
        for attention in self.ATTENTION:
            body = self.forward(attention)
            names = [
                node.target.id
                for node in ast.walk(body)
                if isinstance(node, ast.AnnAssign) and "ALL_ATTENTION_FUNCTIONS" in ast.dump(node.value)
            ]
            calls = [
                node
                for node in ast.walk(body)
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names
            ]
            self.assertEqual((len(names), len(calls)), (1, 1))
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in calls[0].keywords}
            self.assertEqual(keywords["scaling"], "self.scaling")
            self.assertEqual(keywords[None], "kwargs")

    def test_the_projections_read_the_same_expression_in_one_block(self):
        for attention in self.ATTENTION:
            # Statements of the body itself, not of a block in it.
            source = "\n".join(map(ast.unparse, self.forward(attention).body))
            for projection in ["q_proj", "k_proj", "v_proj"]:
                self.assertEqual(source.count(f"\n    self.{projection}"), 0)
                self.assertEqual(source.count(f"self.{projection}"), 1)
                self.assertIn(f"self.{projection}(hidden_states).view(hidden_shape)", source)

    def test_models_say_what_they_support(self):
        for model in [llama.MohLlamaModel, qwen3.MohQwen3Model]:
            self.assertTrue(model._supports_attention_backend)
            self.assertTrue(model.config_class.base_model_tp_plan and model.config_class.base_model_pp_plan)
        model = llama.MohLlamaModel(config())
        attention = model.layers[1].self_attn
        self.assertEqual((attention.layer_idx, attention.scaling), (1, 8**-0.5))
        self.assertIs(attention.config, model.config)


if __name__ == "__main__":
    unittest.main()
