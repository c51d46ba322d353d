// Products that norms are made of, of one sample after the other on the host: per-sample gradients
// with their norms, their weighted sums, and Gram matrices of which only a half is computed; and the
// backward passes of normalisation layers.
#pragma once

#include <cstdint>

namespace fastclip {

// float32 rows of `columns` numbers, `step` apart.
struct Rows {
  const float* values;
  int64_t step;
  int64_t columns;
};

// A convolution of three dimensions; shorter ones begin with dimensions of size 1.
struct Convolution {
  int64_t channels, out_channels;
  int64_t in[3], out[3], kernel[3], stride[3], padding[3], dilation[3];

  int64_t padded(int axis) const { return in[axis] + 2 * padding[axis]; }
  int64_t pixels() const { return in[0] * in[1] * in[2]; }
  int64_t positions() const { return out[0] * out[1] * out[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }
};

// The loops in one instruction set's vectors.
struct ProductLoops {
  int64_t (*panel_scratch)(int64_t depth);
  int64_t (*conv_scratch)(const Convolution&);
  int64_t (*gram_scratch)(int64_t t);
  double (*linear_gradient)(const Rows& a, const Rows& g, int64_t depth, float* out, float* scratch);
  void (*conv_gradient)(const float* x, const float* g, const Convolution&, float* out, float* scratch);
  void (*gram)(const Rows& x, int64_t t, bool side_by_side, float* out, int64_t step, float* scratch);
  void (*fill_below)(float* gram, int64_t t, int64_t strips);
  void (*gram_product)(const float* x, const float* y, int64_t step, int64_t t, double* out);
  double (*squares)(const float* x, int64_t n);
  void (*add_scaled)(const float* x, float scale, int64_t n, float* to);
  void (*add_four_scaled)(const float* const* x, const float* scale, int64_t n, float* to);
  void (*layer_norm)(const float* x, const float* g, const float* mean, const float* rstd,
                     const float* weight, int64_t t, int64_t c, float* dx, float* dw, float* db,
                     float* scratch);
  void (*group_norm)(const float* x, const float* g, const float* mean, const float* rstd,
                     const float* weight, int64_t c, int64_t k, int64_t t, float* dx, float* dw, float* db);
};

// Those with vectors of so many float32 numbers, 8 (AVX2) or 16 (AVX-512); null where this processor,
// or the compiler, does not know them.
const ProductLoops* product_loops(int lanes);

}  // namespace fastclip
