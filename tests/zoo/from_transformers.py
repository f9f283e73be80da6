"""Networks of transformers."""

# The packages may be missing, and what their annotations allow is theirs.
# pyright: reportMissingImports=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.zoo.network import Input, Inputs, Network, Size, cells, image, tokens

_WORDS = 50
_NARROW: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_CALM: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_PIXELS = image(3, "pixel_values")


def _ids(size: Size) -> Inputs:
    return {"input_ids": tokens(size, _WORDS)}


def _masked_ids(size: Size) -> Inputs:
    mask = torch.ones(2, *size, dtype=torch.int64)
    mask[1, -size[0] // 4 :] = 0
    return {"input_ids": tokens(size, _WORDS), "attention_mask": Input(mask, (1,))}


def _pair(size: Size) -> Inputs:
    return {"input_ids": tokens(size, _WORDS), "decoder_input_ids": tokens(size, _WORDS)}


def _image_and_text(size: Size) -> Inputs:
    ids = torch.randint(_WORDS - 2, (2, 6))
    ids[:, -1] = _WORDS - 1
    return {"input_ids": Input(ids), "pixel_values": cells(size)}


def _segformer(size: Size) -> nn.Module:
    config = transformers.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 16, 24],
        decoder_hidden_size=16,
        num_labels=3,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        **_CALM,
    )
    return transformers.SegformerForSemanticSegmentation(config)


def _swin2sr(size: Size) -> nn.Module:
    config = transformers.Swin2SRConfig(
        image_size=size,
        patch_size=1,
        embed_dim=16,
        depths=[2],
        num_heads=[2],
        window_size=4,
        drop_path_rate=0.0,
        **_CALM,
    )
    return transformers.Swin2SRForImageSuperResolution(config)


def _mask2former(size: Size) -> nn.Module:
    backbone = transformers.SwinConfig(
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 2, 2, 2],
        window_size=4,
        drop_path_rate=0.0,
        out_features=["stage1", "stage2", "stage3", "stage4"],
        **_CALM,
    )
    config = transformers.Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        dim_feedforward=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=5,
        num_labels=3,
        dropout=0.0,
    )
    return transformers.Mask2FormerForUniversalSegmentation(config)


def _detr(size: Size) -> nn.Module:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1], out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=5,
        num_labels=3,
        dropout=0.0,
    )
    return transformers.DetrForObjectDetection(config)


def _dpt(size: Size) -> nn.Module:
    config = transformers.DPTConfig(
        image_size=size[0],
        patch_size=8,
        is_hybrid=False,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        reassemble_factors=[4, 2, 1, 0.5],
        use_auxiliary_head=True,
        num_labels=3,
        semantic_classifier_dropout=0.0,
        **{**_NARROW, "num_hidden_layers": 4},
        **_CALM,
    )
    return transformers.DPTForSemanticSegmentation(config)


def _clip(size: Size) -> nn.Module:
    words = {
        **_NARROW,
        "vocab_size": _WORDS,
        "max_position_embeddings": 8,
        "eos_token_id": _WORDS - 1,
    }
    pixels = {**_NARROW, "image_size": size[0], "patch_size": 8}
    config = transformers.CLIPConfig(text_config=words, vision_config=pixels, projection_dim=16)
    return transformers.CLIPModel(config)


def _wav2vec2(size: Size) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        conv_dim=(16, 16, 16),
        conv_kernel=(10, 3, 2),
        conv_stride=(5, 2, 2),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        feat_proj_dropout=0.0,
        layerdrop=0.0,
        apply_spec_augment=False,
        mask_time_prob=0.0,
        **_NARROW,
    )
    return transformers.Wav2Vec2Model(config)


def _bert(size: Size) -> nn.Module:
    config = transformers.BertConfig(vocab_size=_WORDS, **_NARROW, max_position_embeddings=128)
    return transformers.BertForTokenClassification(config)


def _gpt2(size: Size) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=_WORDS,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def _llama(size: Size) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=_WORDS,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
        **_NARROW,
    )
    return transformers.LlamaForCausalLM(config)


def _t5(size: Size) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=_WORDS,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def _mamba(size: Size) -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=_WORDS,
        hidden_size=16,
        state_size=4,
        num_hidden_layers=2,
        use_cache=False,
        use_mambapy=False,
    )
    return transformers.MambaForCausalLM(config)


def _patchtst(size: Size) -> nn.Module:
    config = transformers.PatchTSTConfig(
        num_input_channels=3,
        context_length=size[0],
        patch_length=8,
        patch_stride=4,
        prediction_length=6,
        d_model=16,
        num_attention_heads=2,
        num_hidden_layers=2,
        ffn_dim=32,
        attention_dropout=0.0,
        positional_dropout=0.0,
        ff_dropout=0.0,
        head_dropout=0.0,
        path_dropout=0.0,
        loss="mse",
    )
    return transformers.PatchTSTForPrediction(config)


NETWORKS = [
    Network("transformers/segformer", _segformer, (64, 64), (67, 61), _PIXELS),
    Network("transformers/swin2sr", _swin2sr, (16, 16), (20, 12), _PIXELS),
    Network("transformers/mask2former", _mask2former, (64, 64), (64, 96), _PIXELS),
    Network("transformers/detr", _detr, (64, 64), (67, 61), _PIXELS),
    Network("transformers/dpt", _dpt, (64, 64), (80, 80), _PIXELS),
    Network("transformers/clip", _clip, (32, 32), (40, 40), _image_and_text),
    Network(
        "transformers/wav2vec2",
        _wav2vec2,
        (800,),
        (791,),
        lambda size: {"input_values": Input(torch.randn(2, *size), (1,))},
        learned_input=False,
    ),
    Network(
        "transformers/patchtst",
        _patchtst,
        (32,),
        (35,),
        lambda size: {"past_values": Input(torch.randn(2, *size, 3), (1,))},
    ),
    Network("transformers/bert", _bert, (24,), (23,), _masked_ids, random=True),
    Network("transformers/gpt2", _gpt2, (24,), (23,), _ids),
    Network(
        "transformers/llama",
        _llama,
        (24,),
        (23,),
        _masked_ids,
    ),
    Network(
        "transformers/t5",
        _t5,
        (24,),
        (23,),
        _pair,
    ),
    Network(
        "transformers/mamba",
        _mamba,
        (16,),
        (17,),
        _ids,
        tolerance=1e-5,
        why="computes its norms and its result in float32",
    ),
]
