// Keys and values written into the slots of a cache, as XLA FFI handlers. They update the cache in place: the
// results are the caches that were given.

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common.h"

namespace dflash {
namespace {

constexpr int64_t kSerial = 1 << 15;  // calls with fewer numbers run on one thread

// How a cache stores a number, and the number that is read from there.
struct AsFloat32 {
  using Stored = float;
  static float Of(float x) { return x; }
  static float Read(float stored) { return stored; }
};

struct AsBFloat16 {
  using Stored = uint16_t;
  static uint16_t Of(float x) {  // to nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return std::isnan(x) ? 0x7FC0 : static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
  }
  static float Read(uint16_t stored) {
    const uint32_t bits = static_cast<uint32_t>(stored) << 16;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }
};

struct AsFloat16 {
  using Stored = uint16_t;
  static uint16_t Of(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
  static float Read(uint16_t stored) { return _cvtsh_ss(stored); }
};

// A mask excludes non-finite keys, but not non-finite values: zero times infinity is NaN. Such a value is
// written as zero, and its key as NaN, so that queries which see the slot are not finite, and others are.
template <typename As>
struct Guarded {
  const float *k, *v;
  float key(int64_t i) const { return Finite(i) ? k[i] : std::numeric_limits<float>::quiet_NaN(); }
  float value(int64_t i) const { return Finite(i) ? v[i] : 0.0f; }
  bool AllFinite(int64_t width) const {
    float sum = 0;  // of zeros, unless a number is not finite
    for (int64_t i = 0; i < width; i++) sum += v[i] * 0.0f;
    return sum == 0;
  }

 private:
  bool Finite(int64_t i) const { return std::isfinite(As::Read(As::Of(v[i]))); }
};

// Writes the codes of H numbers and their scale.
template <typename Number>
void Quantise(const Number& number, int64_t width, int8_t* codes, float* scale) {
  float greatest = 0;
  bool finite = true;
  for (int64_t i = 0; i < width; i++) {
    greatest = std::max(greatest, std::fabs(number(i)));
    finite = finite && !std::isnan(number(i));
  }
  *scale = finite ? greatest / 127.0f : std::numeric_limits<float>::quiet_NaN();
  const float divisor = *scale == 0 ? 1.0f : *scale;
  for (int64_t i = 0; i < width; i++) {
    const float code = std::nearbyint(number(i) / divisor);
    codes[i] = std::isnan(code) ? 0 : static_cast<int8_t>(std::clamp(code, -128.0f, 127.0f));
  }
}

using Vectors = ffi::Buffer<ffi::F32, 5>;
using Positions = ffi::Buffer<ffi::S32, 2>;

// Returns whether a cache [B, K, S, H] holds vectors [B, T, K, H].
bool Fits(ffi::Span<const int64_t> cache, const Vectors& vectors) {
  const auto dims = vectors.dimensions();
  return cache.size() == 4 && cache[0] == dims[0] && cache[1] == dims[2] && cache[3] == dims[4];
}

// One vector of each head of tokens, [B, T, K, H], in an array [B, T, K, N, H].
struct Part {
  const float* data;
  int64_t pitch, width;  // of an array, in vectors and in numbers

  Part(const Vectors& all, int64_t index)
      : data(all.typed_data() + index * all.dimensions()[4]), pitch(all.dimensions()[3]), width(all.dimensions()[4]) {}
  const float* operator[](int64_t i) const { return data + i * pitch * width; }
};

// Calls write(from, to) with the numbers of each vector of keys and values, and of their place in the cache
// [B, K, S, H], in vectors. Dead tokens, whose position is negative, and tokens past the end of a cache that
// is no ring are not written.
template <typename Write>
ffi::Error Each(ffi::ThreadPool pool, Vectors k, Vectors v, Positions positions, int64_t slots, bool ring,
                const Write& write) {
  const auto dims = k.dimensions(), same = v.dimensions();
  const int64_t batch = dims[0], tokens = dims[1], heads = dims[2];
  if (!std::equal(dims.begin(), dims.begin() + 3, same.begin()) || dims[4] != same[4] ||
      positions.dimensions()[0] != batch || positions.dimensions()[1] != tokens)
    return ffi::Error::InvalidArgument("the shapes of keys, values and caches do not fit");
  const int32_t* position = positions.typed_data();
  const bool serial = batch * tokens * heads * dims[4] < kSerial;
  Split(pool, batch * tokens, 1, serial, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; token++) {
      const int64_t b = token / tokens, at = position[token];
      if (at < 0 || (at >= slots && !ring)) continue;
      const int64_t slot = at % slots;
      for (int64_t head = 0; head < heads; head++)
        write(token * heads + head, (b * heads + head) * slots + slot);
    }
  });
  return ffi::Error::Success();
}

template <typename As>
ffi::Error WriteFloats(ffi::ThreadPool pool, Vectors k, Vectors v, Positions positions, ffi::Result<ffi::AnyBuffer> keys,
                       ffi::Result<ffi::AnyBuffer> values, bool ring, int32_t key, int32_t value) {
  const int64_t width = k.dimensions()[4];
  const Part of_keys(k, key), of_values(v, value);
  auto* to_k = static_cast<typename As::Stored*>(keys->untyped_data());
  auto* to_v = static_cast<typename As::Stored*>(values->untyped_data());
  return Each(pool, k, v, positions, keys->dimensions()[2], ring, [&](int64_t from, int64_t to) {
    const Guarded<As> given{of_keys[from], of_values[from]};
    if (std::is_same_v<As, AsFloat32> && given.AllFinite(width)) {
      std::memcpy(to_k + to * width, given.k, width * sizeof(float));
      std::memcpy(to_v + to * width, given.v, width * sizeof(float));
      return;
    }
    for (int64_t i = 0; i < width; i++) {
      to_k[to * width + i] = As::Of(given.key(i));
      to_v[to * width + i] = As::Of(given.value(i));
    }
  });
}

// Whether there are a key and a value with these indices.
bool HasParts(const Vectors& k, const Vectors& v, int32_t key, int32_t value) {
  return key >= 0 && key < k.dimensions()[3] && value >= 0 && value < v.dimensions()[3];
}

ffi::Error Write(ffi::ThreadPool pool, Vectors k, Vectors v, Positions positions, ffi::AnyBuffer, ffi::AnyBuffer,
                 ffi::Result<ffi::AnyBuffer> keys, ffi::Result<ffi::AnyBuffer> values, bool ring, int32_t key,
                 int32_t value) {
  if (!HasParts(k, v, key, value) || !Fits(keys->dimensions(), k) || !Fits(values->dimensions(), v) ||
      values->dimensions()[2] != keys->dimensions()[2] || values->element_type() != keys->element_type())
    return ffi::Error::InvalidArgument("keys and values do not fit the cache");
  switch (keys->element_type()) {
    case ffi::F32: return WriteFloats<AsFloat32>(pool, k, v, positions, keys, values, ring, key, value);
    case ffi::BF16: return WriteFloats<AsBFloat16>(pool, k, v, positions, keys, values, ring, key, value);
    case ffi::F16: return WriteFloats<AsFloat16>(pool, k, v, positions, keys, values, ring, key, value);
    default: return ffi::Error::InvalidArgument("keys must be floats");
  }
}

using Codes = ffi::Buffer<ffi::S8, 4>;
using Scales = ffi::Buffer<ffi::F32, 3>;

ffi::Error WriteInt8(ffi::ThreadPool pool, Vectors k, Vectors v, Positions positions, Codes, Codes, Scales, Scales,
                     ffi::Result<Codes> keys, ffi::Result<Codes> values, ffi::Result<Scales> k_scale,
                     ffi::Result<Scales> v_scale, bool ring, int32_t key, int32_t value) {
  const int64_t width = k.dimensions()[4];
  const int64_t slots = keys->dimensions()[2];
  const auto fits = [&](const Scales& scale) {
    const auto dims = scale.dimensions();
    return dims[0] == keys->dimensions()[0] && dims[1] == keys->dimensions()[1] && dims[2] == slots;
  };
  if (!HasParts(k, v, key, value) || !Fits(keys->dimensions(), k) || !Fits(values->dimensions(), v) ||
      values->dimensions()[2] != slots ||
      !fits(*k_scale) || !fits(*v_scale))
    return ffi::Error::InvalidArgument("keys and values do not fit the cache");
  const Part of_keys(k, key), of_values(v, value);
  return Each(pool, k, v, positions, keys->dimensions()[2], ring, [&](int64_t from, int64_t to) {
    const Guarded<AsFloat32> given{of_keys[from], of_values[from]};
    const auto key_at = [&](int64_t i) { return given.key(i); };
    const auto value_at = [&](int64_t i) { return given.value(i); };
    Quantise(key_at, width, keys->typed_data() + to * width, k_scale->typed_data() + to);
    Quantise(value_at, width, values->typed_data() + to * width, v_scale->typed_data() + to);
  });
}

}  // namespace
}  // namespace dflash

using namespace dflash;

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_write, Write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Vectors>()
                                  .Arg<Vectors>()
                                  .Arg<Positions>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("ring")
                                  .Attr<int32_t>("key")
                                  .Attr<int32_t>("value"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(dflash_write_int8, WriteInt8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<Vectors>()
                                  .Arg<Vectors>()
                                  .Arg<Positions>()
                                  .Arg<Codes>()
                                  .Arg<Codes>()
                                  .Arg<Scales>()
                                  .Arg<Scales>()
                                  .Ret<Codes>()
                                  .Ret<Codes>()
                                  .Ret<Scales>()
                                  .Ret<Scales>()
                                  .Attr<bool>("ring")
                                  .Attr<int32_t>("key")
                                  .Attr<int32_t>("value"));
