"""Models that TorchRec publishes, in its package and in its examples, each with the head of a click predictor."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.test_utils.test_model import ModelInput
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from torchrec.models.experimental.transformerdlrm import DLRM_Transformer
from torchrec.modules.mlp import MLP

from experiments.torchrec_support.batches import MAX_LENGTH, NUM_DENSE_FEATURES

__all__ = ["make_published"]

DIM = 16


class TwoTowers(nn.Module):
    """As in TorchRec's examples/retrieval: each tower reads the columns of its features by name."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags, features = bags, [table.feature_names[0] for table in bags.embedding_bag_configs()]
        self.query, self.candidate = features[::2], features[1::2]
        self.query_proj, self.candidate_proj = (
            MLP(DIM * len(each), [32, 8]) for each in (self.query, self.candidate)
        )

    def forward(self, dense: Tensor, ids: object) -> Tensor:
        """Returns the scores, [batch]; the dense features are not read."""
        pooled = self.bags(ids)
        query = self.query_proj(torch.cat([pooled[name] for name in self.query], dim=1))
        candidate = self.candidate_proj(torch.cat([pooled[name] for name in self.candidate], dim=1))
        return (query * candidate).sum(dim=1)


class Bert4Rec(nn.Module):
    """As in TorchRec's examples/bert4rec: a transformer over the rows of a history."""

    def __init__(self, rows: EmbeddingCollection) -> None:
        super().__init__()
        self.rows, self.feature = rows, rows.embedding_configs()[0].feature_names[0]
        self.position = nn.Parameter(torch.randn(MAX_LENGTH, DIM))
        self.encoder = nn.TransformerEncoderLayer(DIM, 2, 32, batch_first=True)
        self.out = nn.Linear(DIM, 1)

    def forward(self, dense: Tensor, ids: object) -> Tensor:
        """Returns the scores, [batch]; the dense features are not read."""
        history = self.rows(ids)[self.feature].to_padded_dense(MAX_LENGTH)
        return self.out(self.encoder(history + self.position)).mean(dim=1).squeeze(1)


class Predictor(nn.Module):
    """A published model, and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: ModelInput) -> tuple[Tensor, Tensor]:
        """Returns the loss and the predictions."""
        scores = self.model(batch.float_features, batch.idlist_features)
        scores = scores if scores.dim() == 1 else scores.squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, batch.label), scores


def make_published(name: str, tables: list[EmbeddingBagConfig], device: torch.device) -> nn.Module:
    """Returns a published model with a loss.

    Args:
        name: which; as a cell has it.
        tables: of the model; those of "BERT4Rec" are ``EmbeddingConfig``.
        device: of its tables.
    """
    if name == "BERT4Rec":
        return Predictor(Bert4Rec(EmbeddingCollection(tables=tables, device=device)))
    bags = EmbeddingBagCollection(tables=tables, device=device)
    bottom, top = [32, DIM], [32, 1]
    match name:
        case "DLRM":
            model: nn.Module = DLRM(bags, NUM_DENSE_FEATURES, bottom, top)
        case "DLRM_DCN":
            model = DLRM_DCN(bags, NUM_DENSE_FEATURES, bottom, top, dcn_num_layers=2, dcn_low_rank_dim=8)
        case "DLRM_Projection":
            model = DLRM_Projection(bags, NUM_DENSE_FEATURES, bottom, top, [32, 2 * DIM], [32, 2 * DIM])
        case "SimpleDeepFMNN":
            model = SimpleDeepFMNN(NUM_DENSE_FEATURES, bags, hidden_layer_size=20, deep_fm_dimension=5)
        case "DLRM_Transformer":
            model = DLRM_Transformer(bags, NUM_DENSE_FEATURES, bottom, top, nhead=4, ntransformer_layers=1)
        case _:
            model = TwoTowers(bags)
    return Predictor(model)
