/* Wires in C: the bits that the functions of `wires.py` give.

   A message of wires 16 and 8 is a scale for each block, f32[ceil(n / BLOCK)], then the numbers. The loops have no
   branches, so compilers make them vector code. */

#include <stdint.h>
#include <string.h>

enum wire { WIRES };

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

static void encode_block_16(const float *x, int64_t n, float *inverse, uint16_t *to) {
  uint32_t largest = largest_of(x, n);
  int is_usable = largest < 0x7F800000u && float_of(largest) > 0;
  int power = is_usable ? 15 - ((int)(largest >> 23) - 126) : 0;
  power = power < -126 ? -126 : power > 126 ? 126 : power;
  float scale = float_of((uint32_t)(127 + power) << 23);
  *inverse = float_of((uint32_t)(127 - power) << 23);
  for (int64_t i = 0; i < n; i++) to[i] = half_of(x[i] * scale);
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

static void encode(int64_t wire, char *to, const float *x, int64_t n) {
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

static void decode(int64_t wire, float *to, const char *sent, int64_t n) {
  const float *scales = (const float *)sent;
  const char *numbers = sent + (n + BLOCK - 1) / BLOCK * sizeof(float);
  if (wire == BF16)
    for (int64_t i = 0; i < n; i++) to[i] = float_of((uint32_t)((const uint16_t *)sent)[i] << 16);
  else
    for (int64_t from = 0; from < n; from += BLOCK) {
      int64_t width = n - from < BLOCK ? n - from : BLOCK;
      float scale = scales[from / BLOCK];
      if (wire == F16)
        for (int64_t i = from; i < from + width; i++) to[i] = of_half(((const uint16_t *)numbers)[i]) * scale;
      else
        for (int64_t i = from; i < from + width; i++) to[i] = (float)((const int8_t *)numbers)[i] * scale;
    }
}
