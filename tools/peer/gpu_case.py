"""A case of causal grouped-query attention: inputs, selected heads, and the reference.

Every variant is compared with f32 attention, computed from the definition head by head, before it is
timed. The answer of a head that a token did not select is zero.
"""

import functools

import torch

from gpu_timing import DEVICE, median_ms

# bf16 rounds inputs, probabilities and results to 8 bits: correct kernels stay under 1e-2.
MAX_ERROR = 2e-2
# The longest sequence that is checked in full. The scores of a head take 4 bytes per pair of
# tokens, so longer sequences are checked on CHECKED_INSTEAD tokens.
MAX_CHECKED = 8192
CHECKED_INSTEAD = 2048
# The compared fractions of active heads, and of shared heads.
SHARED = {0.75: 0.5, 0.5: 0.25}


class Wrong(Exception):
    """A variant's result is wrong."""


class Case:
    def __init__(self, options, length=None, active=None, backward=True):
        self.batch, self.heads, self.kv_heads = options.batch, options.heads, options.kv_heads
        self.length, self.head_dim = length or options.length, options.head_dim
        self.active, self.backward = active, backward
        generator = torch.Generator(DEVICE).manual_seed(1)
        rows = (self.length, self.head_dim)

        def random(heads):
            return torch.randn((self.batch, heads, *rows), generator=generator, device=DEVICE,
                               dtype=torch.bfloat16)

        self.query, self.gradient = random(self.heads), random(self.heads)
        self.key, self.value = random(self.kv_heads), random(self.kv_heads)
        for tensor in self.inputs:
            tensor.requires_grad_(backward)
        self.shared_heads = self.heads
        self.selected = None
        if active is not None:
            self.shared_heads = round(SHARED[active] * self.heads)
            self.selected = self.select(generator)

    def select(self, generator):
        """Returns the shared heads and random routed heads of each token: bool of batch, head, token."""
        scores = torch.rand(self.batch, self.length, self.heads, generator=generator, device=DEVICE)
        scores[..., :self.shared_heads] = 2.0
        chosen = scores.topk(round(self.active * self.heads), dim=-1).indices
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        return selected.transpose(1, 2).contiguous()

    @property
    def inputs(self):
        return self.query, self.key, self.value

    def gradients(self, call):
        """Returns the result of `call` and the gradients of query, key and value."""
        result = call()
        return (result, *torch.autograd.grad(result, self.inputs, self.gradient))

    @functools.cached_property
    def answers(self):
        """Returns the result and the three gradients in f32."""
        group = self.heads // self.kv_heads
        answers = [torch.zeros(tensor.shape, device=DEVICE)
                   for tensor in (self.query, *self.inputs)]
        later = torch.ones(self.length, self.length, dtype=torch.bool, device=DEVICE).triu(1)
        for batch in range(self.batch):
            for head in range(self.heads):
                at = [(batch, head), (batch, head // group), (batch, head // group)]
                inputs = [tensor[index].detach().float().requires_grad_()
                          for tensor, index in zip(self.inputs, at)]
                query, key, value = inputs
                scores = (query @ key.T * self.head_dim**-0.5).masked_fill(later, -torch.inf)
                result = scores.softmax(-1) @ value
                if self.selected is not None:
                    result = result * self.selected[batch, head, :, None]
                found = torch.autograd.grad(result, inputs, self.gradient[batch, head].float())
                answers[0][batch, head] = result.detach()
                for answer, index, gradient in zip(answers[1:], at, found):
                    answer[index] += gradient
        return answers

    def check(self, call, backward):
        """Returns the largest relative error of the result and the gradients. Raises Wrong if it is too large."""
        found = self.gradients(call) if backward else [call().detach()]
        names = ["result", "gradient of query", "gradient of key", "gradient of value"]
        largest = 0.0
        for name, tensor, answer in zip(names, found, self.answers):
            error = ((tensor.float() - answer).norm() / answer.norm()).item()
            # The comparison is false for NaN.
            if not error <= MAX_ERROR:
                raise Wrong(f"{name}: relative error {error:.2e}")
            largest = max(largest, error)
        return largest

    def fields(self):
        return {"active": self.active or 1.0, "length": self.length, "batch": self.batch,
                "heads": self.heads, "kv_heads": self.kv_heads, "head_dim": self.head_dim}

    def useful_operations(self):
        """Returns the FLOPs forward: two matmuls over the causal half, for the active heads."""
        return (2.0 * self.batch * self.heads * self.length**2 * self.head_dim
                * (self.active or 1.0))


def measure(case, build, options):
    """Checks a variant, then times it. Yields figures as they are measured.

    `build(case)` returns the call to time. If the selected heads determine a mask or an index, it also returns
    the work that computes the mask or index again, as a training step does in every layer, otherwise None.
    The forward pass is first, with its check, so that its figures stay if the backward pass
    fails. It is the forward pass of training, which keeps the data for the backward pass.
    """
    call, prepare = build(case)
    checked, checked_call = case, call
    if case.length > MAX_CHECKED:
        checked = Case(options, CHECKED_INSTEAD, case.active, case.backward)
        checked_call = build(checked)[0]
    yield {"checked_length": checked.length, "relative_error": checked.check(checked_call, False)}
    operations = case.useful_operations()
    forward = median_ms(call, options)
    yield {"forward_ms": forward, "forward_tflops": operations / forward / 1e9}
    if prepare:
        yield {"mask_ms": median_ms(prepare, options)}
    if not case.backward:
        return
    yield {"relative_error": checked.check(checked_call, True)}
    del checked, checked_call
    both = median_ms(lambda: case.gradients(call), options)
    # FLOPs of the difference, since autograd runs the backward pass only after a forward pass. Five
    # matmuls, including the recomputation of the scores.
    alone = both - forward
    yield {"forward_backward_ms": both, "backward_ms": alone,
           "backward_tflops": 2.5 * operations / alone / 1e9}
