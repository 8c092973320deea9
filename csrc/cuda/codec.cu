// Compress and decompress floats: one kernel each way, which reads and writes every byte once.
//
// The arithmetic is csrc/codec.h's and must not be contracted into multiply-adds: compile with --fmad=false.
#include "codes.cuh"
#include "group.cuh"
#include "rotated.cuh"
#include "ways.cuh"

namespace gact::cuda {
namespace {

// ---- Kernels -----------------------------------------------------------------------------------------------------

template <class Format, int kRun, class Way>
__global__ void __launch_bounds__(kThreads, kBlocksWhereCompressing<typename Format::Bits, kRun> - Way::kFewerBlocks)
    compress_groups(Rows rows, Groups groups, Way ways) {
  using Bits = typename Format::Bits;
  for_each_group<kRun>(groups, [&](Place<kRun> place) {
    int64_t index;
    const Whole& way = ways.find(place.group, index);
    const int bits = way.bits;
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
    const uint32_t key = group_key(way.seed_key, uint64_t(index), metadata.minimum, metadata.step);
    const auto quantize_regular = [&](Bits element, int32_t noise) {
      const int32_t code = quantize(Format::decode(element), scale.minimum, factor, noise);
      return code < scale.levels ? code : scale.levels;
    };
    Codes<kRun> codes;
    if (irregular || way.to_nearest) {
#pragma unroll 1
      for (int index = 0; index < elements.kQuads; ++index) {
        uint32_t quad[elements.kQuadWords], word = 0;
        elements.get_quad(index, quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const auto element = get_item<Bits>(quad, i);
          const int32_t noise =
              way.to_nearest ? kHalf : noise_behind<Rounding::kStochastic>(key, place.within(4 * index), i);
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
    codes.pack(bits, way.blob.codes + index * (groups.segment() * bits), way.blob.codes_aligned, place);
    if (place.lane == 0) {
      store_value(way.blob.minimum + index * int(sizeof(Bits)), metadata.minimum, way.blob.minimum_aligned);
      store_value(way.blob.step + index * 2, metadata.step, way.blob.step_aligned);
    }
  });
}

// `rounding`: dither, or any other.
template <class Format, int kRun, Rounding rounding, class Way>
__global__ void __launch_bounds__(kThreads, kBlocksWhereDecompressing)
    decompress_groups(Groups groups, Way ways, void* values, bool wide) {
  using Bits = typename Format::Bits;
  for_each_group<kRun>(groups, [&](Place<kRun> place) {
    int64_t index;
    const Whole& way = ways.find(place.group, index);
    const int bits = way.bits;
    Codes<kRun> codes;
    codes.unpack(bits, way.blob.codes + index * (groups.segment() * bits), way.blob.codes_aligned, place);
    const Metadata<Format> metadata{
        load_value<Bits>(way.blob.minimum + index * int(sizeof(Bits)), way.blob.minimum_aligned),
        load_value<uint16_t>(way.blob.step + index * 2, way.blob.step_aligned)};
    const uint32_t key = group_key(way.seed_key, uint64_t(index), metadata.minimum, metadata.step);
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

template <class Format, int kRun, class Way>
void launch_compress(const Rows& rows, const Groups& groups, const Way& ways, Rounding rounding, void* stream) {
  const auto kernel =
      rounding == Rounding::kRotated ? compress_rotated_groups<Format, kRun, Way> : compress_groups<Format, kRun, Way>;
  launch(kernel, groups, stream, rows, groups, ways);
}

template <class Format, int kRun, class Way>
void launch_decompress(const Groups& groups, const Way& ways, Rounding rounding, void* values, void* stream) {
  const auto kernel = rounding == Rounding::kRotated  ? decompress_rotated_groups<Format, kRun, Way>
                      : rounding == Rounding::kDither ? decompress_groups<Format, kRun, Rounding::kDither, Way>
                                                      : decompress_groups<Format, kRun, Rounding::kNearest, Way>;
  launch(kernel, groups, stream, groups, ways, values, is_aligned(values, 16));
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
  if (codec.bits == kBFloat16Bits) {
    const Groups groups(blob.numel, codec.group_size, kFloat32Run);
    const bool to_nearest = codec.rounding == Rounding::kNearest;
    launch(to_nearest ? compress_to_bfloat16<Rounding::kNearest> : compress_to_bfloat16<Rounding::kStochastic>, groups,
           stream, rows, groups, blob.codes, is_aligned(blob.codes, 8), seed_key(codec.seed));
    return;
  }
  dispatch(codec, [&](auto format, auto run) {
    using Format = decltype(format);
    const Groups groups(blob.numel, codec.group_size, run);
    launch_compress<Format, run>(rows, groups, way_of<Format, run>(codec, blob), codec.rounding, stream);
  });
}

void decompress(const Blob& blob, const Codec& codec, void* values, void* stream) {
  if (codec.bits == kBFloat16Bits) {
    const Groups groups(blob.numel, codec.group_size, kFloat32Run);
    launch(decompress_from_bfloat16, groups, stream, blob.codes, is_aligned(blob.codes, 8), groups, values,
           is_aligned(values, 16));
    return;
  }
  dispatch(codec, [&](auto format, auto run) {
    using Format = decltype(format);
    const Groups groups(blob.numel, codec.group_size, run);
    launch_decompress<Format, run>(groups, way_of<Format, run>(codec, blob), codec.rounding, values, stream);
  });
}

void compress_runs(const void* values, int64_t places, const CodedRun* runs, int count, void* stream) {
  dispatch(runs->codec, [&](auto format, auto run) {
    using Format = decltype(format);
    for_runs<Format, run>(runs, count, places, [&](const Groups& groups, const ByPlace& ways, Rounding rounding) {
      const Rows rows = rows_of({values, groups.numel, 1, {groups.numel}, {1}}, runs->codec);
      launch_compress<Format, run>(rows, groups, ways, rounding, stream);
    });
  });
}

void decompress_runs(const CodedRun* runs, int count, int64_t places, void* values, void* stream) {
  dispatch(runs->codec, [&](auto format, auto run) {
    using Format = decltype(format);
    for_runs<Format, run>(runs, count, places, [&](const Groups& groups, const ByPlace& ways, Rounding rounding) {
      launch_decompress<Format, run>(groups, ways, rounding, values, stream);
    });
  });
}

}  // namespace gact::cuda
