// Moves weights into strips of 16 columns (see formats.h): floats, floats quantised in int8, and blocks
// of ggml's formats. The reader of files calls these functions by ctypes.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "formats.h"

namespace dflash {
namespace {

// The arrays of one column, each at the column's place in its strip: a number every 16, a quad every 64.
struct Column {
  uint8_t* codes;
  uint16_t *scale, *low;
  uint8_t *sub, *sub_low;
};

uint16_t Half(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  return bits;
}

// Moves codes, four to a quad.
void PutQuads(uint8_t* to, const uint8_t* codes, int quads) {
  for (int i = 0; i < quads; i++) std::memcpy(to + i * kQuads, codes + 4 * i, 4);
}

// Joins the low halves of 32 codes in bytes, and moves them.
void PutNibbles(uint8_t* to, const uint8_t (&codes)[kGroup]) {
  uint8_t joined[16];
  for (int k = 0; k < 16; k++) joined[k] = (codes[k] & 15) | codes[k + 16] << 4;
  PutQuads(to, joined, 4);
}

// Moves 32 codes of five bits.
void PutFiveBits(uint8_t* to, const uint8_t (&codes)[kGroup]) {
  PutNibbles(to, codes);
  uint32_t joined = 0;
  for (int quad = 0; quad < 8; quad++) {
    uint32_t of_quad;
    std::memcpy(&of_quad, codes + 4 * quad, sizeof of_quad);
    joined |= (of_quad >> 4 & 0x01010101u) << quad;
  }
  std::memcpy(to + 4 * kQuads, &joined, sizeof joined);
}

// Moves 32 codes of six bits.
void PutSixBits(uint8_t* to, const uint8_t (&codes)[kGroup]) {
  PutNibbles(to, codes);
  uint8_t joined[8];
  for (int k = 0; k < 8; k++) {
    const uint8_t* at = codes + k / 4 * 8 + k % 4;
    joined[k] = at[0] >> 4 | at[16] >> 4 << 2 | at[4] >> 4 << 4 | at[20] >> 4 << 6;
  }
  PutQuads(to + 4 * kQuads, joined, 2);
}

// Each moves the block at the start of group `g`.
struct Q8_0Block {
  using Format = Q8_0;
  static constexpr int64_t kBytes = 34;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    uint8_t codes[kGroup];
    for (int k = 0; k < kGroup; k++) codes[k] = block[2 + k] ^ 0x80;
    to.scale[g * kStrip] = Half(block);
    PutQuads(to.codes + g * Format::kGroupBytes, codes, 8);
  }
};

struct Q4_0Block {
  using Format = Q4_0;
  static constexpr int64_t kBytes = 18;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g * kStrip] = Half(block);
    PutQuads(to.codes + g * Format::kGroupBytes, block + 2, 4);
  }
};

struct MXFP4Block {
  using Format = MXFP4;
  static constexpr int64_t kBytes = 17;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    // 2^(e - 128) as a bfloat16, whose exponent is one lower; the two least are subnormal.
    const int e = block[0];
    to.scale[g * kStrip] = static_cast<uint16_t>(e > 1 ? (e - 1) << 7 : 0x20 << e);
    uint8_t codes[16];
    for (int k = 0; k < 16; k++) codes[k] = Positive(block[1 + k] & 15) | Positive(block[1 + k] >> 4) << 4;
    PutQuads(to.codes + g * Format::kGroupBytes, codes, 4);
  }
  // The code without the sign of a zero.
  static uint8_t Positive(int code) { return code == 8 ? 0 : static_cast<uint8_t>(code); }
};

// The fifth bits of eight codes, by the byte that holds them: shifts by numbers that differ are slow.
struct FifthBits {
  uint8_t of[256][8];
  constexpr FifthBits() : of() {
    for (int byte = 0; byte < 256; byte++)
      for (int k = 0; k < 8; k++) of[byte][k] = static_cast<uint8_t>((byte >> k & 1) << 4);
  }
};
constexpr FifthBits kFifthBits;

// Moves the codes of Q5_0 and Q5_1, whose fifth bits are stored in front of the others.
inline void PutSplitCodes(const uint8_t* fifth, const Column& to, int64_t g) {
  uint8_t codes[kGroup];
  for (int i = 0; i < 4; i++) std::memcpy(codes + 8 * i, kFifthBits.of[fifth[i]], 8);
  for (int k = 0; k < 16; k++) {
    codes[k] |= fifth[4 + k] & 15;
    codes[k + 16] |= fifth[4 + k] >> 4;
  }
  PutFiveBits(to.codes + g * Q5_0::kGroupBytes, codes);
}

struct Q5_0Block {
  using Format = Q5_0;
  static constexpr int64_t kBytes = 22;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g * kStrip] = Half(block);
    PutSplitCodes(block + 2, to, g);
  }
};

struct Q5_1Block {
  using Format = Q5_1;
  static constexpr int64_t kBytes = 24;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g * kStrip] = Half(block);
    to.low[g * kStrip] = Half(block + 2) ^ 0x8000;  // ggml adds it
    PutSplitCodes(block + 4, to, g);
  }
};

struct IQ4_NLBlock : Q4_0Block {
  using Format = IQ4_NL;
};

struct IQ4_XSBlock {
  using Format = IQ4_XS;
  static constexpr int64_t kBytes = 136;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g / kSuper * kStrip] = Half(block);
    const int high = Half(block + 2);
    for (int j = 0; j < kSuper; j++) {
      const int low = block[4 + j / 2] >> 4 * (j % 2) & 15;
      to.sub[(g + j) * kStrip] = static_cast<uint8_t>((low | (high >> 2 * j & 3) << 4) - 32);
      PutQuads(to.codes + (g + j) * Format::kGroupBytes, block + 8 + 16 * j, 4);
    }
  }
};

struct Q4_1Block {
  using Format = Q4_1;
  static constexpr int64_t kBytes = 20;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g * kStrip] = Half(block);
    to.low[g * kStrip] = Half(block + 2) ^ 0x8000;  // ggml adds it
    PutQuads(to.codes + g * Format::kGroupBytes, block + 4, 4);
  }
};

// Moves the scales of Q4_K and Q5_K at the start of a block.
inline void PutSixBitScales(const uint8_t* block, const Column& to, int64_t g) {
  to.scale[g / kSuper * kStrip] = Half(block);
  to.low[g / kSuper * kStrip] = Half(block + 2);
  const uint8_t* bits = block + 4;
  for (int j = 0; j < kSuper; j++) {
    const int high = j >= 4;
    const int64_t at = (g + j) * kStrip;
    to.sub[at] = high ? (bits[j + 4] & 15) | bits[j - 4] >> 6 << 4 : bits[j] & 63;
    to.sub_low[at] = high ? bits[j + 4] >> 4 | bits[j] >> 6 << 4 : bits[j + 4] & 63;
  }
}

struct Q4_KBlock {
  using Format = Q4_K;
  static constexpr int64_t kBytes = 144;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    PutSixBitScales(block, to, g);
    for (int j = 0; j < kSuper; j++) {
      uint8_t codes[kGroup];
      for (int k = 0; k < kGroup; k++) codes[k] = block[16 + j / 2 * 32 + k] >> 4 * (j % 2) & 15;
      PutNibbles(to.codes + (g + j) * Format::kGroupBytes, codes);
    }
  }
};

struct Q5_KBlock {
  using Format = Q5_K;
  static constexpr int64_t kBytes = 176;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    PutSixBitScales(block, to, g);
    for (int j = 0; j < kSuper; j++) {
      uint8_t codes[kGroup];
      for (int k = 0; k < kGroup; k++)
        codes[k] = (block[48 + j / 2 * 32 + k] >> 4 * (j % 2) & 15) | (block[16 + k] >> j & 1) << 4;
      PutFiveBits(to.codes + (g + j) * Format::kGroupBytes, codes);
    }
  }
};

struct Q6_KBlock {
  using Format = Q6_K;
  static constexpr int64_t kBytes = 210;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g / kSuper * kStrip] = Half(block + 208);
    for (int j = 0; j < kSuper; j++) {
      for (int half = 0; half < 2; half++)
        to.sub[(2 * (g + j) + half) * kStrip] = block[192 + 2 * j + half];
      const int run = j % 4;
      const uint8_t* low = block + 64 * (j / 4) + 32 * (run % 2);
      const uint8_t* high = block + 128 + 32 * (j / 4);
      uint8_t codes[kGroup];
      for (int k = 0; k < kGroup; k++)
        codes[k] = (low[k] >> 4 * (run / 2) & 15) | (high[k] >> 2 * run & 3) << 4;
      PutSixBits(to.codes + (g + j) * Format::kGroupBytes, codes);
    }
  }
};

template <typename T>
T* After(T* array, int64_t count) { return array ? array + count : nullptr; }

template <typename Block>
void Repack(const uint8_t* const* rows, int64_t columns, int64_t groups, uint8_t* codes,
            uint16_t* scale, uint16_t* low, uint8_t* sub, uint8_t* sub_low) {
  using Format = typename Block::Format;
  const auto size = [&](Part part) { return PerStrip<Format>(part, groups); };
  for (int64_t first = 0; first < columns; first += kStrip) {
    const int64_t strip = first / kStrip, count = std::min(kStrip, columns - first);
    for (int64_t g = 0; g < groups; g += Format::kScaled)
      for (int64_t lane = 0; lane < count; lane++) {
        const uint8_t* const row = rows[first + lane];
        if (!row) continue;
        const Column to{After(codes, strip * size(kCodes) + 4 * lane),
                        After(scale, strip * size(kScale) + lane),
                        After(low, strip * size(kLow) + lane), After(sub, strip * size(kSub) + lane),
                        After(sub_low, strip * size(kSubLow) + lane)};
        Block::Move(row + g / Format::kScaled * Block::kBytes, to, g);
      }
  }
}

// Quantises kLanes columns of w [K, N], of which `count` exist: round(w / scale), scale = max|w| / 127.
void QuantiseColumns(const float* w, int64_t depth, int64_t columns, int64_t count, uint8_t* codes,
                     float* scale) {
  const auto row = [&](int64_t k) {
    if (k < depth && count >= kLanes) return Load(w + k * columns);
    float part[kLanes] = {};
    if (k < depth) std::copy_n(w + k * columns, count, part);
    return Load(part);
  };
  Ints most = AllInts(0);
  for (int64_t k = 0; k < depth; k++) most = Max(most, Magnitude(row(k)));
  float scales[kLanes], divisors[kLanes];
  std::memcpy(scales, &most, sizeof scales);
  for (int i = 0; i < kLanes; i++) {
    scales[i] /= 127.0f;
    divisors[i] = scales[i] == 0.0f ? 1.0f : scales[i];
  }
  std::copy_n(scales, std::min(count, kLanes), scale);
  const Floats divisor = Load(divisors);
  for (int64_t k = 0; k < depth; k += 4, codes += kQuads) {
    int32_t rounded[4][kLanes];
    for (int i = 0; i < 4; i++) {
      const Ints code = Rounded(row(k + i) / divisor);
      std::memcpy(rounded[i], &code, sizeof code);
    }
    const int64_t rows = std::min<int64_t>(4, depth - k);
    for (int64_t lane = 0; lane < std::min(count, kLanes); lane++)
      for (int64_t i = 0; i < rows; i++)
        codes[4 * lane + i] = static_cast<uint8_t>(rounded[i][lane]) ^ 0x80;
  }
}

}  // namespace
}  // namespace dflash

// Moves rows of numbers into strips.
// Args:
//   w: K rows of `row` bytes.
//   strip: bytes of the numbers of a row in a strip.
//   out: [strips, K, strip], zeros.
extern "C" void dflash_interleave(const uint8_t* w, int64_t depth, int64_t row, int64_t strip,
                                  uint8_t* out) {
  const int64_t several = 16 * strip;  // few enough to be written at once
  for (int64_t first = 0; first < row; first += several)
    for (int64_t k = 0; k < depth; k++)
      for (int64_t at = first; at < std::min(first + several, row); at += strip)
        std::memcpy(out + (at / strip * depth + k) * strip, w + k * row + at, std::min(strip, row - at));
}

// Args:
//   w: floats [K, N].
//   codes, scale: the arrays of the strips, zeros.
extern "C" void dflash_quantise_int8(const float* w, int64_t depth, int64_t columns, uint8_t* codes,
                                     float* scale) {
  using namespace dflash;
  const int64_t strip = (depth + 3) / 4 * kQuads;  // bytes
  for (int64_t at = 0; at < columns; at += kLanes)
    QuantiseColumns(w + at, depth, columns, columns - at,
                    codes + at / kStrip * strip + at % kStrip * 4, scale + at);
}

// Args:
//   rows: the blocks of each column; null leaves the column as it is.
//   groups: of 32 weights of a column.
//   codes, ...: the arrays of the strips, zeros; null if the format does not have them.
#define REPACK(name, Block)                                                                          \
  extern "C" void name(const uint8_t* const* rows, int64_t columns, int64_t groups, uint8_t* codes,  \
                       uint16_t* scale, uint16_t* low, uint8_t* sub, uint8_t* sub_low) {             \
    dflash::Repack<dflash::Block>(rows, columns, groups, codes, scale, low, sub, sub_low);           \
  }

REPACK(dflash_repack_q8_0, Q8_0Block)
REPACK(dflash_repack_q4_0, Q4_0Block)
REPACK(dflash_repack_q4_1, Q4_1Block)
REPACK(dflash_repack_mxfp4, MXFP4Block)
REPACK(dflash_repack_q5_0, Q5_0Block)
REPACK(dflash_repack_q5_1, Q5_1Block)
REPACK(dflash_repack_q4_k, Q4_KBlock)
REPACK(dflash_repack_q5_k, Q5_KBlock)
REPACK(dflash_repack_q6_k, Q6_KBlock)
REPACK(dflash_repack_iq4_nl, IQ4_NLBlock)
REPACK(dflash_repack_iq4_xs, IQ4_XSBlock)
