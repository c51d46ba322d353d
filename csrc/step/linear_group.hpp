// Norms and clipped sums of linear layers of one kind, whose samples have one position each.
#pragma once

#include <ATen/ATen.h>

#include <vector>

namespace fastclip {

// Squared norms of g_b a_b^T, never below them: ||a_b||^2 ||g_b||^2, [l, b], as fastclip.ops.linear has
// them (single_norm). An input that several layers share is read once.
//   a: [b, d] each. g: [b, p] each. lost_a, lost_g: what squares that underflow can hide.
at::Tensor single_norms(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g, double lost_a, double lost_g);

// sum_b scale_b g_b a_b^T of each layer, [p, d], as fastclip.ops.linear has it (scaled_sum).
//   any: a scale may be 0. scale: [b], or [l, b]; a sample of scale 0 contributes 0 even where it is not finite.
std::vector<at::Tensor> scaled_sums(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g,
                                    const at::Tensor& scale, bool any);

}  // namespace fastclip
