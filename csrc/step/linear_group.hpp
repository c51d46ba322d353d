// Norms and clipped sums of linear layers.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace fastclip {

// Squared norms of g_b a_b^T, never below them: ||a_b||^2 ||g_b||^2, [l, b], as fastclip.ops.linear has
// them (single_norm). An input that several layers share is read once.
//   a: [b, 1, d] or [b, d] each. g: [b, 1, p] or [b, p] each. lost_a, lost_g: what squares that underflow can hide of each.
at::Tensor single_norms(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g,
                        const std::vector<double>& lost_a, const std::vector<double>& lost_g);

// sum_b scale_b g_b^T a_b of each layer, [p, d], as fastclip.ops.linear has it (scaled_sum).
//   a: [b, t, d] or [b, d] each, and g likewise. any: a scale may be 0.
//   scale: [b], or [l, b]; a sample of scale 0 contributes 0 even where it is not finite.
std::vector<at::Tensor> scaled_sums(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g,
                                    const at::Tensor& scale, bool any);

}  // namespace fastclip
