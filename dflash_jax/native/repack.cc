// Moves the blocks of ggml's formats into strips of 16 columns (see formats.h), for the reader of
// files, which calls these functions by ctypes.

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

struct Q4_1Block {
  using Format = Q4_1;
  static constexpr int64_t kBytes = 20;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g * kStrip] = Half(block);
    to.low[g * kStrip] = Half(block + 2) ^ 0x8000;  // ggml adds it
    PutQuads(to.codes + g * Format::kGroupBytes, block + 4, 4);
  }
};

struct Q4_KBlock {
  using Format = Q4_K;
  static constexpr int64_t kBytes = 144;
  static void Move(const uint8_t* block, const Column& to, int64_t g) {
    to.scale[g / kSuper * kStrip] = Half(block);
    to.low[g / kSuper * kStrip] = Half(block + 2);
    const uint8_t* bits = block + 4;
    for (int j = 0; j < kSuper; j++) {
      const int high = j >= 4;
      const int64_t at = (g + j) * kStrip;
      to.sub[at] = high ? (bits[j + 4] & 15) | bits[j - 4] >> 6 << 4 : bits[j] & 63;
      to.sub_low[at] = high ? bits[j + 4] >> 4 | bits[j] >> 6 << 4 : bits[j + 4] & 63;
      uint8_t codes[kGroup];
      for (int k = 0; k < kGroup; k++) codes[k] = block[16 + j / 2 * 32 + k] >> 4 * (j % 2) & 15;
      PutNibbles(to.codes + (g + j) * Format::kGroupBytes, codes);
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
      uint8_t codes[kGroup], top[kGroup];
      for (int k = 0; k < kGroup; k++) {
        codes[k] = low[k] >> 4 * (run / 2) & 15;
        top[k] = high[k] >> 2 * run & 3;
      }
      uint8_t* quads = to.codes + (g + j) * Format::kGroupBytes;
      PutNibbles(quads, codes);
      uint8_t joined[8];
      for (int k = 0; k < 8; k++) {
        const uint8_t* at = top + k / 4 * 8 + k % 4;
        joined[k] = at[0] | at[16] << 2 | at[4] << 4 | at[20] << 6;
      }
      PutQuads(quads + 4 * kQuads, joined, 2);
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
        const Column to{After(codes, strip * size(kCodes) + 4 * lane),
                        After(scale, strip * size(kScale) + lane),
                        After(low, strip * size(kLow) + lane), After(sub, strip * size(kSub) + lane),
                        After(sub_low, strip * size(kSubLow) + lane)};
        Block::Move(rows[first + lane] + g / Format::kScaled * Block::kBytes, to, g);
      }
  }
}

}  // namespace
}  // namespace dflash

// Args:
//   rows: the blocks of each column.
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
REPACK(dflash_repack_q4_k, Q4_KBlock)
REPACK(dflash_repack_q6_k, Q6_KBlock)
