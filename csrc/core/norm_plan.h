// The calls of a normalization on a GPU.
#pragma once

#include "core/norm_kernels.h"

namespace gpudist {

// Properties shared by all blocks of one shape; see NormArguments.
struct NormShape {
  NormWalk walk;
  Dtype dtype;         // of the block
  Dtype result_dtype;  // of the normalized block: `dtype`, or float32 of 16 bits
  int64_t outer;
  int64_t channels;
  int64_t cells;
  int64_t groups;
  int64_t group_size;
  int64_t group_offset;
  bool shares_outer;
  double count;
  double eps;
  bool subtracts_mean;
};

// Tensors of a pass over the block; a null pointer stands for none.
struct NormTensors {
  const char* x = nullptr;
  const char* gradient = nullptr;
  char* result = nullptr;
  double* totals = nullptr;
  const double* of_totals = nullptr;
  const double* shifts = nullptr;  // totals whose means are subtracted from float64 cells
  double* sums = nullptr;
  double* workspace = nullptr;
  const char* weight = nullptr;
  const char* bias = nullptr;
  char* of_weight = nullptr;
  char* of_bias = nullptr;
  const uint32_t* failed = nullptr;
  Dtype parameter_dtype = Dtype::kFloat32;
};

// Running moments that the pass to the normalized block updates.
struct NormRunning {
  char* mean = nullptr;
  char* variance = nullptr;
  const int64_t* batches = nullptr;
  double momentum = 0;
  Dtype dtype = Dtype::kFloat32;
};

class NormPlan {
 public:
  // Throws TransportError if the shape or the dtype is not supported, as the calls do for the dtype
  // of parameters.
  NormPlan(const NormShape& shape, uint32_t multiprocessors);

  // Size of the workspace that the sums need, in numbers.
  int64_t workspace() const;

  // Sums of the block, or of its gradients; one or two calls, of which the second is to run after
  // the first. `finish` has no blocks if it is not needed.
  NormCall sums(const NormTensors& tensors) const;
  NormCall finish_sums(const NormCall& sums) const;
  NormCall normalize(const NormTensors& tensors, const NormRunning& running) const;
  NormCall gradient_sums(const NormTensors& tensors) const;
  NormCall finish_gradient_sums(const NormCall& sums) const;
  NormCall gradient(const NormTensors& tensors) const;

 private:
  bool is_wide(NormPass pass, const NormTensors& tensors) const;
  // Throws TransportError if parameters or running moments may not have this dtype.
  void check_dtype(Dtype of_parameters) const;
  NormCall call(NormPass pass, const NormTensors& tensors) const;
  NormGrid rows(int64_t width, int64_t loads) const;
  NormGrid columns(int64_t outer, int64_t rows, int64_t columns, int64_t width, int64_t loads,
                   int64_t most_lanes) const;
  NormGrid grid(NormPass pass, bool is_wide) const;
  int64_t statistics() const;

  NormShape shape_;
  int64_t least_blocks_;
};

}  // namespace gpudist
