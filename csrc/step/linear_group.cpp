#include "linear_group.hpp"

namespace fastclip {

namespace {

constexpr int64_t kChunk = 1024;  // fastclip.ops.numerics says why rows are cut

at::Tensor widened(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : x.to(at::kFloat); }

int64_t chunk_of(int64_t length) {
  for (int64_t n = kChunk; n > kChunk / 8; --n)
    if (length % n == 0) return n;
  return kChunk;
}

at::Tensor row_norm_sq(const at::Tensor& given) {
  auto x = widened(given);
  const auto length = x.size(1);
  if (length > 1 && x.stride(1) != 1) x = x.contiguous();
  if (length <= kChunk) return at::linalg_vector_norm(x, 2, {1}).square();
  const auto chunk = chunk_of(length), whole = length - length % chunk;
  auto total = at::linalg_vector_norm(x.slice(1, 0, whole).unflatten(1, {-1, chunk}), 2, {2}).square().sum({1});
  return whole < length ? total + at::linalg_vector_norm(x.slice(1, whole), 2, {1}).square() : total;
}

}  // namespace

at::Tensor single_norms(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g, double lost_a, double lost_g) {
  std::vector<at::Tensor> found;
  found.reserve(a.size());
  at::Tensor norm_a;
  for (size_t k = 0; k < a.size(); ++k) {
    const bool shared = k && a[k].is_same(a[k - 1]);
    if (!shared) norm_a = row_norm_sq(a[k]) + lost_a;
    found.push_back(norm_a * (row_norm_sq(g[k]) + lost_g));
  }
  return at::stack(found);
}

std::vector<at::Tensor> scaled_sums(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g,
                                    const at::Tensor& scale, bool any) {
  const auto dead = any ? (scale == 0).unsqueeze(-1) : at::Tensor();
  const bool apart = scale.dim() == 2;
  std::vector<at::Tensor> found;
  found.reserve(a.size());
  for (size_t k = 0; k < a.size(); ++k) {
    const auto row = static_cast<int64_t>(k);
    auto x = widened(a[k]), y = widened(g[k]);
    if (any) x = x.masked_fill(apart ? dead[row] : dead, 0), y = y.masked_fill(apart ? dead[row] : dead, 0);
    const auto factor = (apart ? scale[row] : scale).to(x.scalar_type()).unsqueeze(-1);
    auto& less = x.size(1) < y.size(1) ? x : y;
    less = less * factor;
    found.push_back(at::mm(y.t(), x));
  }
  return found;
}

}  // namespace fastclip
