// How a kernel codes a tensor's groups: all in one way, or by their place in a row (gact_fx/codec/by_place.py).
#pragma once

#include "lane.cuh"

namespace gact::cuda {

// Sections of a blob, and whether the lanes' accesses to them are aligned.
struct Sections {
  uint8_t* codes;
  uint8_t* minimum;
  uint8_t* step;
  bool codes_aligned, minimum_aligned, step_aligned;
};

// What a kernel codes: all groups of a tensor in one way.
struct Whole {
  static constexpr int kFewerBlocks = 0;  // on a multiprocessor, for registers
  Sections blob;
  int bits;
  bool to_nearest;
  uint32_t seed_key;

  // How the `group`-th of the kernel's groups is coded, as the `index`-th in its blob. `group` becomes its number in
  // the tensor.
  __device__ const Whole& find(int64_t& group, int64_t& index) const {
    index = group;
    return *this;
  }
};

// Or groups of every row in one way, and others in another.
constexpr int kMaxRuns = 32;  // a kernel's parameters have 4096 bytes
struct ByPlace {
  struct Run : Whole {
    int64_t first, count;  // groups of a row
    int64_t begin;         // the number of the first one among the kernel's groups
  };
  static constexpr int kFewerBlocks = 1;
  Run runs[kMaxRuns];
  int count;
  int64_t places;  // groups of a row

  __device__ const Whole& find(int64_t& group, int64_t& index) const {
    int i = 0;
    while (i + 1 < count && group >= runs[i + 1].begin) ++i;
    const Run& run = runs[i];
    index = group - run.begin;
    // Division takes a GPU several times as long with 64 bits.
    const bool is_short = index <= INT32_MAX && run.count <= INT32_MAX;
    const int64_t row = is_short ? int64_t(uint32_t(index) / uint32_t(run.count)) : index / run.count;
    group = row * places + run.first + (index - row * run.count);
    return run;
  }
};
static_assert(sizeof(ByPlace) <= 3072);

template <class Format, int kRun>
Whole way_of(const Codec& codec, const Blob& blob) {
  const Sections sections = {blob.codes,
                             blob.minimum,
                             blob.step,
                             is_aligned(blob.codes, kRun),
                             is_aligned(blob.minimum, sizeof(typename Format::Bits)),
                             is_aligned(blob.step, sizeof(uint16_t))};
  return {sections, codec.bits, codec.rounding == Rounding::kNearest, seed_key(codec.seed)};
}

// Calls `function` with as many of the runs as a kernel takes, the groups that they have together, and their rounding;
// where groups may be rotated that is one run, for the wide ones are not.
template <class Format, int kRun, class Function>
void for_runs(const CodedRun* runs, int count, int64_t places, Function function) {
  bool is_rotated = false;
  for (int i = 0; i < count; ++i) is_rotated = is_rotated || runs[i].codec.rounding == Rounding::kRotated;
  const int most = is_rotated ? 1 : kMaxRuns;
  int64_t numel = 0;
  for (int i = 0; i < count; ++i) numel += runs[i].blob.numel;
  for (int from = 0; from < count; from += most) {
    Groups groups(numel, runs->codec.group_size, kRun);
    ByPlace ways{{}, 0, places};
    groups.count = 0;
    for (int i = from; i < count && i < from + most; ++i) {
      const Whole way = way_of<Format, kRun>(runs[i].codec, runs[i].blob);
      ways.runs[ways.count++] = {way, runs[i].first, runs[i].count, groups.count};
      groups.count += runs[i].blob.numel / groups.size;
    }
    function(groups, ways, runs[from].codec.rounding);
  }
}

}  // namespace gact::cuda
