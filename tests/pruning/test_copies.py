"""Copies of prepared models are independent of each other."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from bitwright import ExportBackend
from bitwright.pruning import MagnitudePruner

from .networks import TokenModel, counted


def test_finalizing_a_copy_leaves_the_original_alone():
    """Although torch gives a parametrized module a class that its copies would share."""
    model = nn.Sequential(counted(4, 4), counted(4, 4))
    pruner = MagnitudePruner(model)
    pruner.prepare((torch.randn(1, 4),))
    clone = copy.deepcopy(model)
    pruner.finalize(clone, backend=ExportBackend.CoreML)
    assert not hasattr(clone[0], "parametrizations")
    assert torch.equal(model[0].weight, clone[0].weight)
    assert pruner._is_model_prepared(model)
    again = copy.deepcopy(model)
    pruner.finalize(model, backend=ExportBackend.CoreML)
    assert torch.equal(again[1].weight, model[1].weight)


def test_copies_of_rnns_use_their_own_weights():
    """The list that an RNN keeps belongs to the copy."""
    model = TokenModel().eval()
    tokens = (torch.randint(0, 12, (2, 5)),)
    MagnitudePruner(model).prepare(tokens)
    clone = copy.deepcopy(model)
    before = model(*tokens)
    with torch.no_grad():
        clone.rnn.parametrizations.weight_ih_l0.original.mul_(2)
    assert torch.equal(model(*tokens), before)
    assert not torch.equal(clone(*tokens), before)


def test_copying_an_rnn_runs_no_simulator():
    """Which would go on observing; torch's recurrent layers look at their weights when they are copied."""
    model = TokenModel().eval()
    tokens = (torch.randint(0, 12, (2, 5)),)
    MagnitudePruner(model).prepare(tokens)
    expected, calls = model(*tokens), []
    simulator = model.rnn.parametrizations.weight_ih_l0[0]
    handle = simulator.register_forward_hook(lambda *_: calls.append(1))
    clone = copy.deepcopy(model)
    handle.remove()
    assert not calls
    assert all(any(one is own for own in clone.rnn.parameters()) for one in clone.rnn._flat_weights)
    assert torch.equal(pickle.loads(pickle.dumps(model))(*tokens), expected)
