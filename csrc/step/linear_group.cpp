#include "linear_group.hpp"

namespace fastclip {

namespace {

constexpr int64_t kChunk = 1024;  // fastclip.core.numerics says why rows are cut

at::Tensor in_type(const at::Tensor& x, at::ScalarType type) { return x.scalar_type() == type ? x : x.to(type); }

at::Tensor widened(const at::Tensor& x) { return x.scalar_type() == at::kDouble ? x : in_type(x, at::kFloat); }

// All positions of all samples, one below the other.
at::Tensor as_matrix(const at::Tensor& x) { return x.dim() == 2 ? x : x.flatten(0, 1); }

at::Tensor column(const std::vector<double>& numbers, const at::Tensor& like) {
  return at::tensor(numbers, like.options()).unsqueeze(1);
}

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

at::Tensor single_norms(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g,
                        const std::vector<double>& lost_a, const std::vector<double>& lost_g) {
  std::vector<at::Tensor> of_a, of_g;
  for (size_t k = 0; k < a.size(); ++k) {
    const bool shared = k && a[k].is_same(a[k - 1]);
    of_a.push_back(shared ? of_a.back() : row_norm_sq(a[k].dim() == 2 ? a[k] : a[k].flatten(1)));
    of_g.push_back(row_norm_sq(g[k].dim() == 2 ? g[k] : g[k].flatten(1)));
  }
  const auto norm_a = at::stack(of_a), norm_g = at::stack(of_g);
  return (norm_a + column(lost_a, norm_a)) * (norm_g + column(lost_g, norm_g));
}

std::vector<at::Tensor> scaled_sums(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& g,
                                    const at::Tensor& scale, bool any) {
  const bool apart = scale.dim() == 2;
  at::Tensor factors, dead;  // of the last layer's type and number of axes
  std::vector<at::Tensor> found;
  found.reserve(a.size());
  for (size_t k = 0; k < a.size(); ++k) {
    const auto row = static_cast<int64_t>(k);
    auto x = widened(a[k]), y = widened(g[k]);
    const auto axes = x.dim() - 1 + scale.dim();
    if (!factors.defined() || factors.scalar_type() != x.scalar_type() || factors.dim() != axes) {
      factors = in_type(scale, x.scalar_type()).unsqueeze(-1);
      if (factors.dim() < axes) factors = factors.unsqueeze(-1);
      if (any) dead = factors == 0;
    }
    if (any) x = x.masked_fill(apart ? dead[row] : dead, 0), y = y.masked_fill(apart ? dead[row] : dead, 0);
    auto& less = x.size(-1) < y.size(-1) ? x : y;
    less = less * (apart ? factors[row] : factors);
    found.push_back(at::mm(as_matrix(y).t(), as_matrix(x)));
  }
  return found;
}

}  // namespace fastclip
