/* Wires in C: the bits that the functions of `wires.py` give.

   A message of wires 16 and 8 is a scale for each block, f32[ceil(n / BLOCK)], then the numbers. The loops have no
   branches, so compilers make them vector code; of a processor's wider vectors the loader takes what there is. */

#include <stdint.h>
#include <string.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

enum wire { WIRES };

#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_WIDE_VECTORS __attribute__((target_clones("avx2", "default")))
#else
#define FOR_WIDE_VECTORS
#endif

static uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* To nearest, ties to even. Below 2^-14 a half's last place is that of a number in [0.5, 1), so an addition rounds. */
static uint16_t half_of(float x) {
  uint32_t sign = bits_of(x) & 0x80000000u, bits = bits_of(x) ^ sign;
  uint32_t normal = (bits + 0xC8000FFFu + (bits >> 13 & 1)) >> 13;
  uint32_t subnormal = bits_of(float_of(bits) + 0.5f) - 0x3F000000u;
  uint32_t too_large = bits > 0x7F800000u ? 0x7E00u : 0x7C00u;
  return (uint16_t)(sign >> 16 | (bits >= 0x47800000u ? too_large : bits < 0x38800000u ? subnormal : normal));
}

static float of_half(uint16_t half) {
  uint32_t bits = (half & 0x7FFFu) << 13, exponent = bits & 0x0F800000u;
  uint32_t normal = bits + 0x38000000u;
  uint32_t subnormal = bits_of(float_of(normal + 0x00800000u) - float_of(0x38800000u));
  uint32_t not_finite = normal + 0x38000000u;
  uint32_t all = exponent == 0x0F800000u ? not_finite : exponent ? normal : subnormal;
  return float_of(all | (uint32_t)(half & 0x8000u) << 16);
}

static uint16_t bfloat16_of(float x) {
  uint32_t bits = bits_of(x), rounded = (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
  return (uint16_t)((bits & 0x7FFFFFFFu) > 0x7F800000u ? (bits >> 16 & 0x8000u) | 0x7FC0u : rounded);
}

/* The bits of the largest |x|. As integers NaN are above infinity, and so found. */
static uint32_t largest_of(const float *x, int64_t n) {
  int32_t largest = 0;
  for (int64_t i = 0; i < n; i++) {
    int32_t bits = (int32_t)(bits_of(x[i]) & 0x7FFFFFFFu);
    largest = bits > largest ? bits : largest;
  }
  return (uint32_t)largest;
}

#if defined(__x86_64__) && defined(__GNUC__)
/* Processors with AVX2 convert eight numbers at once, with the same rounding. */
__attribute__((target("avx2,f16c"))) static int64_t wide_halves_of(const float *x, int64_t n, float scale, uint16_t *to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 scaled = _mm256_mul_ps(_mm256_loadu_ps(x + i), _mm256_set1_ps(scale));
    _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(scaled, _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) static int64_t of_wide_halves(const uint16_t *halves, int64_t n, float scale, float *to) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(halves + i)));
    _mm256_storeu_ps(to + i, _mm256_mul_ps(x, _mm256_set1_ps(scale)));
  }
  return i;
}

static int has_wide_halves(void) { return __builtin_cpu_supports("avx2"); }
#else
static int64_t wide_halves_of(const float *x, int64_t n, float scale, uint16_t *to) { return 0; }
static int64_t of_wide_halves(const uint16_t *halves, int64_t n, float scale, float *to) { return 0; }
static int has_wide_halves(void) { return 0; }
#endif

static void encode_block_16(const float *x, int64_t n, float *inverse, uint16_t *to) {
  uint32_t largest = largest_of(x, n);
  int is_usable = largest < 0x7F800000u && float_of(largest) > 0;
  int power = is_usable ? 15 - ((int)(largest >> 23) - 126) : 0;
  power = power < -126 ? -126 : power > 126 ? 126 : power;
  float scale = float_of((uint32_t)(127 + power) << 23);
  *inverse = float_of((uint32_t)(127 - power) << 23);
  for (int64_t i = has_wide_halves() ? wide_halves_of(x, n, scale, to) : 0; i < n; i++) to[i] = half_of(x[i] * scale);
}

static void decode_block_16(const uint16_t *halves, int64_t n, float scale, float *to) {
  for (int64_t i = has_wide_halves() ? of_wide_halves(halves, n, scale, to) : 0; i < n; i++) to[i] = of_half(halves[i]) * scale;
}

static void encode_block_8(const float *x, int64_t n, float *scale, int8_t *to) {
  uint32_t largest = largest_of(x, n);
  float over_127 = float_of(largest) * (1.0f / 127);
  float rounded_up = float_of((bits_of(over_127) + 0xFFu) & 0xFFFFFF00u);
  float least = float_of(0x00800000u);
  *scale = largest < 0x7F800000u ? (rounded_up > least ? rounded_up : least) : float_of(0x7FC00000u);
  float inverse = 1.0f / *scale;
  /* Added to 1.5 * 2^23 a number is rounded to an integer, which is in the last bits. */
  for (int64_t i = 0; i < n; i++) to[i] = (int8_t)bits_of(x[i] * inverse + 12582912.0f);
}

FOR_WIDE_VECTORS static void encode(int64_t wire, char *to, const float *x, int64_t n) {
  float *scales = (float *)to;
  char *numbers = to + (n + BLOCK - 1) / BLOCK * sizeof(float);
  if (wire == BF16)
    for (int64_t i = 0; i < n; i++) ((uint16_t *)to)[i] = bfloat16_of(x[i]);
  else
    for (int64_t from = 0; from < n; from += BLOCK) {
      int64_t width = n - from < BLOCK ? n - from : BLOCK;
      if (wire == F16)
        encode_block_16(x + from, width, &scales[from / BLOCK], (uint16_t *)numbers + from);
      else
        encode_block_8(x + from, width, &scales[from / BLOCK], (int8_t *)numbers + from);
    }
}

/* Decode `width` of a message's n floats, from one at which a block begins. */
FOR_WIDE_VECTORS static void decode(int64_t wire, float *to, const char *sent, int64_t n, int64_t from, int64_t width) {
  const float *scales = (const float *)sent + from / BLOCK;
  const char *numbers = sent + (n + BLOCK - 1) / BLOCK * sizeof(float);
  if (wire == F32)
    memcpy(to, sent + from * sizeof(float), width * sizeof(float));
  else if (wire == BF16)
    for (int64_t i = 0; i < width; i++) to[i] = float_of((uint32_t)((const uint16_t *)sent)[from + i] << 16);
  else
    for (int64_t at = 0; at < width; at += BLOCK) {
      int64_t count = width - at < BLOCK ? width - at : BLOCK;
      float scale = scales[at / BLOCK];
      const int8_t *multiples = (const int8_t *)numbers + from + at;
      if (wire == F16)
        decode_block_16((const uint16_t *)numbers + from + at, count, scale, to + at);
      else
        for (int64_t i = 0; i < count; i++) to[at + i] = (float)multiples[i] * scale;
    }
}
