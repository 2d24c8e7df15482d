// Tiles of AMX, eight registers of up to 16 rows of 64 bytes each, and whether this process may use them.
//
// The instructions are written as assembly: the compilers' functions for them take literal numbers of
// tiles only, and GCC's do not state that loading a tile reads memory. So the library needs no flag of
// a compiler for AMX, and loads on every processor with AVX-512.

#ifndef DFLASH_NATIVE_AMX_H_
#define DFLASH_NATIVE_AMX_H_

#include <cpuid.h>

#include "common.h"

#if DFLASH_AVX512 && defined(__linux__) && defined(__x86_64__) && defined(__has_include)
#if __has_include(<amxint8intrin.h>)  // of compilers whose assemblers know AMX
#define DFLASH_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#ifndef DFLASH_AMX
#define DFLASH_AMX 0
#endif

namespace dflash {

constexpr int64_t kTileRows = 16, kTileBytes = 64;  // of a tile, at most

// Why products do without tiles; build.py has the same numbers.
enum TileState { kUsable, kNotCompiled, kNotInProcessor, kNotEnabled, kNotPermitted };

#if DFLASH_AMX
#define DFLASH_TILES(...) __asm__ volatile(__VA_ARGS__)

// Asks the processor and Linux, which gives a process tiles on request only.
inline TileState FindTiles() {
  unsigned a, b, c, d;
  constexpr unsigned kTilesAndInt8 = 3u << 24, kSavesStates = 1u << 27;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kTilesAndInt8) != kTilesAndInt8)
    return kNotInProcessor;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & kSavesStates)) return kNotEnabled;
  __asm__("xgetbv" : "=a"(a), "=d"(d) : "c"(0));
  constexpr unsigned kTileStates = 3u << 17;
  if ((a & kTileStates) != kTileStates) return kNotEnabled;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? kNotPermitted : kUsable;
}

#else
#define DFLASH_TILES(...)

inline TileState FindTiles() { return kNotCompiled; }

#endif

// Rows and bytes of a row of each tile, as the instruction reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void Set(int tile, int64_t of_rows, int64_t of_bytes) {
    rows[tile] = static_cast<uint8_t>(of_rows);
    bytes[tile] = static_cast<uint16_t>(of_bytes);
  }
};

// The tiles of this thread, from the first shapes on until the end of a task. Others may not find any:
// they would be saved with the thread's registers, and a processor with tiles in use sleeps less deeply.
class Tiles {
 public:
  Tiles() = default;
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() {
    if (rows_) DFLASH_TILES("tilerelease" ::);
  }
  // Shapes the tiles by `shapes(rows)`, unless they are.
  template <typename Shapes>
  void Shape(int64_t rows, const Shapes& shapes) {
    if (rows_ == rows) return;
    const TileShapes wanted = shapes(rows);
    DFLASH_TILES("ldtilecfg %0" ::"m"(wanted));
    rows_ = rows;
  }

 private:
  int64_t rows_ = 0;
};

template <int tile>
void ClearTile() {
  DFLASH_TILES("tilezero %%tmm%c0" ::"i"(tile));
}

// Loads or stores a tile whose rows of `kBytes` follow each other. The memory is an operand, so that
// compilers may keep other numbers in registers.
template <int tile, int64_t kBytes = kTileBytes>
void LoadTile(const void* at) {
  using Lines = const uint8_t[kTileRows][kBytes];
  DFLASH_TILES("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(at), "r"(kBytes), "i"(tile),
               "m"(*static_cast<Lines*>(at)));
}

template <int tile>
void StoreTile(void* at) {
  using Lines = uint8_t[kTileRows][kTileBytes];
  DFLASH_TILES("tilestored %%tmm%c3, (%1,%2,1)"
               : "=m"(*static_cast<Lines*>(at))
               : "r"(at), "r"(kTileBytes), "i"(tile));
}

// Adds products of signed bytes of tile `a` and bytes of tile `b`, which are signed or not.
template <int sums, int a, int b, bool is_signed = false>
void MultiplyTiles() {
  if (is_signed)
    DFLASH_TILES("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
  else
    DFLASH_TILES("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

// Whether products use tiles: if the process may, and they were not turned off.
inline std::atomic<bool> use_tiles{false};

}  // namespace dflash

#endif  // DFLASH_NATIVE_AMX_H_
