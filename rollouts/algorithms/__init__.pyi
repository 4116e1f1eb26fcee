"""The public names of this package: the only list of them, for editors, type checkers and, by rollouts/_lazy.py, at run time."""

from .advantages import apply_kl_penalty as apply_kl_penalty, compute_advantages as compute_advantages, gae as gae
from .corrections import anchor_to_proximal as anchor_to_proximal
from .estimators import estimate_gigpo as estimate_gigpo, estimate_group_relative as estimate_group_relative
from .anchors import GiGPOSettings as GiGPOSettings, hash_observation as hash_observation
from .gigpo_steps import (
    system_apply_gigpo_to_batch_steps as system_apply_gigpo_to_batch_steps,
    with_step_advantages as with_step_advantages,
)
from .kl import bounded as bounded, k1 as k1, k2 as k2, k3 as k3
from .loss_weights import (
    fixed_length_mean as fixed_length_mean,
    sample_mean as sample_mean,
    sample_sum as sample_sum,
    token_mean as token_mean,
)
from .losses import (
    KLTerm as KLTerm,
    grpo_loss as grpo_loss,
    policy_loss as policy_loss,
    ppo_loss as ppo_loss,
    sft_loss as sft_loss,
)
from .presets import (
    chain as chain,
    cispo as cispo,
    dapo as dapo,
    decoupled as decoupled,
    dppo as dppo,
    dppo_kl as dppo_kl,
    dr_grpo as dr_grpo,
    gdpo as gdpo,
    gigpo as gigpo,
    gkd as gkd,
    gmpo as gmpo,
    gpg as gpg,
    grpo as grpo,
    gspo as gspo,
    kl_cov as kl_cov,
    max_rl as max_rl,
    online_dpo as online_dpo,
    opd as opd,
    opo as opo,
    pass_at_k as pass_at_k,
    ppo as ppo,
    recomputed as recomputed,
    reinforce as reinforce,
    reinforce_plus_plus as reinforce_plus_plus,
    reinforce_plus_plus_baseline as reinforce_plus_plus_baseline,
    remax as remax,
    rloo as rloo,
    sapo as sapo,
    truncated as truncated,
)
from .statistics import (
    batch_mean as batch_mean,
    batch_std as batch_std,
    group_mean as group_mean,
    group_std as group_std,
    leave_one_out_mean as leave_one_out_mean,
    whiten as whiten,
)
from .surrogates import clipped as clipped, sequence_ratio as sequence_ratio, token_ratio as token_ratio
