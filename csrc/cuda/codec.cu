// Compress and decompress floats: one kernel each way, which reads and writes every byte once.
//
// The arithmetic is csrc/codec.h's and must not be contracted into multiply-adds: compile with --fmad=false.
#include "codes.cuh"
#include "group.cuh"

namespace gact::cuda {
namespace {

// Sections of a blob, and whether the lanes' accesses to them are aligned.
struct Sections {
  uint8_t* codes;
  uint8_t* minimum;
  uint8_t* step;
  bool codes_aligned, minimum_aligned, step_aligned;
};

struct Parameters {
  int bits;
  bool to_nearest;
  uint32_t seed_key;
};

// ---- Kernels -----------------------------------------------------------------------------------------------------

template <class Format, int kRun>
__global__ void __launch_bounds__(kThreads, kBlocksWhereCompressing<typename Format::Bits, kRun>)
    compress_groups(Rows rows, Groups groups, Sections blob, Parameters parameters) {
  using Bits = typename Format::Bits;
  const int bits = parameters.bits;
  for_each_group<kRun>(groups, [&](const Place<kRun>& place) {
    Elements<Bits, kRun> elements;
    elements.load(rows, groups, place);

    const Extremes<Format> extremes(elements, groups.lanes());
    const bool irregular = extremes.is_irregular();
    Metadata<Format> metadata = regular_metadata(extremes, bits);
    if (__any_sync(kWholeWarp, irregular)) {
      // All lanes of the warp shuffle, also those whose group is regular.
      const Metadata<Format> found = find_irregular_metadata<Format>(elements, groups.lanes(), bits);
      if (irregular) metadata = found;
    }

    const auto scale = irregular ? irregular_scale(metadata, bits) : regular_scale(metadata, bits);
    const auto factor = inverse(scale.step);
    const uint32_t key = group_key(parameters.seed_key, uint64_t(place.group), metadata.minimum, metadata.step);
    const auto quantize_regular = [&](Bits element, int32_t noise) {
      const int32_t code = quantize(Format::decode(element), scale.minimum, factor, noise);
      return code < scale.levels ? code : scale.levels;
    };
    Codes<kRun> codes;
    if (irregular || parameters.to_nearest) {
#pragma unroll 1
      for (int index = 0; index < elements.kQuads; ++index) {
        uint32_t quad[elements.kQuadWords], word = 0;
        elements.get_quad(index, quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto element = get_item<Bits>(quad, i);
          const int32_t noise =
              parameters.to_nearest ? kHalf : noise_behind<Rounding::kStochastic>(key, place.within(4 * index), i);
          const int32_t code = irregular ? quantize_irregular<Format>(element, scale, factor, metadata.step, noise)
                                         : quantize_regular(element, noise);
          word |= uint32_t(code) << 8 * i;
        }
        codes.set_quad(index, word);
      }
    } else {
      with_noise<Rounding::kStochastic>(key, place, [&](auto noise_of) {
        codes.fill([&](int i) { return quantize_regular(elements.get(i), noise_of(i)); });
      });
    }
    codes.clear_padding(groups, place);
    codes.pack(bits, blob.codes + place.group * (groups.segment() * bits), blob.codes_aligned, place);
    if (place.lane == 0) {
      store_value(blob.minimum + place.group * int(sizeof(Bits)), metadata.minimum, blob.minimum_aligned);
      store_value(blob.step + place.group * 2, metadata.step, blob.step_aligned);
    }
  });
}

// `rounding`: dither, or any other.
template <class Format, int kRun, Rounding rounding>
__global__ void __launch_bounds__(kThreads, kBlocksWhereDecompressing)
    decompress_groups(Sections blob, Groups groups, Parameters parameters, void* values, bool wide) {
  using Bits = typename Format::Bits;
  const int bits = parameters.bits;
  for_each_group<kRun>(groups, [&](const Place<kRun>& place) {
    Codes<kRun> codes;
    codes.unpack(bits, blob.codes + place.group * (groups.segment() * bits), blob.codes_aligned, place);
    const Metadata<Format> metadata{
        load_value<Bits>(blob.minimum + place.group * int(sizeof(Bits)), blob.minimum_aligned),
        load_value<uint16_t>(blob.step + place.group * 2, blob.step_aligned)};
    const uint32_t key = group_key(parameters.seed_key, uint64_t(place.group), metadata.minimum, metadata.step);
    const bool irregular = metadata.step & kIrregular;
    const auto scale = irregular ? irregular_scale(metadata, bits) : regular_scale(metadata, bits);
    const auto step = fine_step<rounding>(scale.step);
    const auto decode_regular = [&](uint32_t code, int32_t noise) {
      return Format::encode(dequantize<rounding>(int32_t(code), scale.minimum, step, noise));
    };
    const Output<Bits, kRun> output(values, groups, place);
    if (irregular || !wide || output.present < groups.size) {
      output.store_items([&](int quad, int i) {
        const uint32_t code = codes.get_quad(quad) >> 8 * i & 0xff;
        const int32_t noise = noise_behind<rounding>(key, place.within(4 * quad), i);
        return irregular ? dequantize_irregular<rounding, Format>(int32_t(code), scale, metadata.step, noise)
                         : decode_regular(code, noise);
      });
    } else {
      with_noise<rounding>(key, place, [&](auto noise_of) {
        output.store_pieces([&](int i) { return decode_regular(codes.get(i), noise_of(i)); });
      });
    }
  });
}

constexpr int kFloat32Run = 4;

// A run of bfloat16 codes is two words.
template <Rounding rounding>
__global__ void __launch_bounds__(kThreads, kBlocksWhereCompressing<uint64_t, kFloat32Run>)
    compress_to_bfloat16(Rows rows, Groups groups, uint8_t* codes, bool aligned, uint32_t seed_key) {
  for_each_group<kFloat32Run>(groups, [&](const Place<kFloat32Run>& place) {
    Elements<uint32_t, kFloat32Run> elements;
    elements.load(rows, groups, place);
    const uint32_t key = group_key(seed_key, uint64_t(place.group), uint32_t(0), 0);
    const int64_t first = place.group * groups.size;
#pragma unroll
    for (int run = 0; run < kSegments; ++run) {
      uint32_t words[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kFloat32Run; ++i) {
        const int within = place.within(run * kFloat32Run + i);
        const uint32_t code = round_to_bfloat16<rounding>(elements.get(run * kFloat32Run + i), key, uint32_t(within));
        words[i / 2] |= (first + within < groups.numel ? code : 0) << i % 2 * 16;
      }
      store_words(codes + 2 * (first + place.within(run * kFloat32Run)), words, aligned);
    }
  });
}

__global__ void __launch_bounds__(kThreads, kBlocksWhereDecompressing)
    decompress_from_bfloat16(const uint8_t* codes, bool aligned, Groups groups, void* values, bool wide) {
  for_each_group<kFloat32Run>(groups, [&](const Place<kFloat32Run>& place) {
    uint32_t words[2 * kSegments];
#pragma unroll
    for (int run = 0; run < kSegments; ++run) {
      uint32_t pair[2];
      load_words(pair, codes + 2 * (place.group * groups.size + place.within(run * kFloat32Run)), aligned);
      words[2 * run] = pair[0];
      words[2 * run + 1] = pair[1];
    }
    const Output<uint32_t, kFloat32Run> output(values, groups, place);
    if (wide && output.present >= groups.size) {
      output.store_pieces([&](int i) { return get_item<uint16_t>(words, i) << 16; });
    } else {
#pragma unroll
      for (int i = 0; i < kSegments * kFloat32Run; ++i) {
        if (place.within(i) < output.present) output.data[place.within(i)] = get_item<uint16_t>(words, i) << 16;
      }
    }
  });
}

// ---- Choice of a kernel ------------------------------------------------------------------------------------------

int item_size(Source source) { return source == Source::kFloat64 ? 8 : source == Source::kFloat32 ? 4 : 2; }

Rows rows_of(const Strided& values, const Codec& codec) {
  Rows rows{values.data, values.numel, values.numel, 0, 1, values.is_contiguous(), false};
  if (values.rank == 1) rows.inner = values.stride[0];
  if (values.rank == 2) {
    rows.length = values.size[1];
    rows.stride = values.stride[0];
    rows.inner = values.stride[1];
  }
  const int64_t piece = 16 / item_size(codec.source);
  rows.wide = is_aligned(values.data, 16) &&
              (rows.contiguous || (rows.inner == 1 && rows.length % piece == 0 && rows.stride % piece == 0));
  return rows;
}

template <class Format, int kRun>
Sections sections_of(const Blob& blob) {
  return {blob.codes,
          blob.minimum,
          blob.step,
          is_aligned(blob.codes, kRun),
          is_aligned(blob.minimum, sizeof(typename Format::Bits)),
          is_aligned(blob.step, sizeof(uint16_t))};
}

// Calls `function` with the source's format and the length of a lane's runs: sixteen bytes, but four elements at least,
// for packing goes by four; and no more than the smallest group has for one lane.
template <class Function>
void dispatch(const Codec& codec, Function function) {
  const auto choose_run = [&](auto format) {
    if (codec.group_size == kSegments * 4) return function(format, std::integral_constant<int, 4>());
    return function(format, std::integral_constant<int, 8>());
  };
  switch (codec.source) {
    case Source::kFloat32:
      return function(Float32(), std::integral_constant<int, kFloat32Run>());
    case Source::kFloat64:
      return function(Float64(), std::integral_constant<int, 4>());
    case Source::kBFloat16:
      return choose_run(BFloat16());
    case Source::kFloat16:
      return choose_run(Float16());
  }
}

}  // namespace

bool reads(const Strided& values, const Codec&) {
  return values.rank <= 1 || (values.rank == 2 && values.stride[1] == 1);
}

void compress(const Strided& values, const Codec& codec, const Blob& blob, void* stream) {
  const Rows rows = rows_of(values, codec);
  const uint32_t key = seed_key(codec.seed);
  const bool to_nearest = codec.rounding == Rounding::kNearest;
  if (codec.bits == kBFloat16Bits) {
    const Groups groups(blob.numel, codec.group_size, kFloat32Run);
    launch(to_nearest ? compress_to_bfloat16<Rounding::kNearest> : compress_to_bfloat16<Rounding::kStochastic>, groups,
           stream, rows, groups, blob.codes, is_aligned(blob.codes, 8), key);
    return;
  }
  dispatch(codec, [&](auto format, auto run) {
    const Groups groups(blob.numel, codec.group_size, run);
    launch(compress_groups<decltype(format), run>, groups, stream, rows, groups,
           sections_of<decltype(format), run>(blob), Parameters{codec.bits, to_nearest, key});
  });
}

void decompress(const Blob& blob, const Codec& codec, void* values, void* stream) {
  const bool wide = is_aligned(values, 16);
  if (codec.bits == kBFloat16Bits) {
    const Groups groups(blob.numel, codec.group_size, kFloat32Run);
    launch(decompress_from_bfloat16, groups, stream, blob.codes, is_aligned(blob.codes, 8), groups, values, wide);
    return;
  }
  dispatch(codec, [&](auto format, auto run) {
    using Format = decltype(format);
    const Groups groups(blob.numel, codec.group_size, run);
    const auto kernel = codec.rounding == Rounding::kDither ? decompress_groups<Format, run, Rounding::kDither>
                                                            : decompress_groups<Format, run, Rounding::kNearest>;
    const Parameters parameters{codec.bits, codec.rounding == Rounding::kNearest, seed_key(codec.seed)};
    launch(kernel, groups, stream, sections_of<Format, run>(blob), groups, parameters, values, wide);
  });
}

}  // namespace gact::cuda
