/* Entry-wise operators on rows of float32: the k-th largest magnitude, trim or drop, elect or add.
 *
 * compiled.py builds this file and passes it whole rows. It uses the vector types of gcc and clang.
 * Two functions use instructions that compilers do not choose, and have a plain fallback. Results
 * round as in `Tensors` of compiled.py: no fused multiply-add (-ffp-contract=off), equal sum order.
 */
#include <stdint.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The upper half of a number is taken to be its second."
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t Mask __attribute__((vector_size(16), aligned(4), may_alias));
typedef uint8_t Bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint16_t Shorts __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t Words __attribute__((vector_size(16), may_alias));
typedef uint64_t Longs __attribute__((vector_size(16), may_alias));
typedef uint32_t __attribute__((may_alias)) Bits;

/* ---- The k-th largest magnitude --------------------------------------------------------------
 * The bits of magnitudes have the order of the magnitudes. A sample gives an approximate range for
 * the upper 15 bits of the answer. In this range every number gets a byte, and a search that counts
 * bytes finds the exact upper bits. The lower 16 are searched among the few numbers with these.
 */
enum { GROUP = 64, FULL = 255, SAMPLES = 150 };

/* Pad the last group with zeros, which are never counted: thresholds are above 0. */
static void pad(uint8_t *keys, int64_t num) {
  for (int64_t i = num; i % GROUP; i++) keys[i] = 0;
}

static int64_t total_of(const Bytes *sums) {
  Shorts pairs = {0};
  for (int j = 0; j < 4; j++) pairs += ((Shorts)sums[j] & 0xff) + ((Shorts)sums[j] >> 8);
  Words fours = ((Words)pairs & 0xffff) + ((Words)pairs >> 16);
  Longs eights = ((Longs)fours & 0xffffffff) + ((Longs)fours >> 32);
  return (int64_t)(eights[0] + eights[1]);
}

/* Count the keys that reach the threshold. A byte of a sum can count up to FULL groups. */
static int64_t count(const uint8_t *keys, int64_t num, int threshold) {
  const Bytes least = (Bytes){0} + (uint8_t)threshold;
  int64_t found = 0;
  for (int64_t begin = 0; begin < num; begin += GROUP * FULL) {
    int64_t end = begin + GROUP * FULL < num ? begin + GROUP * FULL : num;
    Bytes sums[4] = {{0}, {0}, {0}, {0}};
    for (int64_t i = begin; i < end; i += GROUP)
      for (int j = 0; j < 4; j++) sums[j] -= (Bytes)(*(const Bytes *)(keys + i + 16 * j) >= least);
    found += total_of(sums);
  }
  return found;
}

/* Keys that bracket the answer: at_low = count(low) >= k > at_high = count(high). */
typedef struct { int low, high; int64_t at_low, at_high; } Bracket;

static void narrow(Bracket *bracket, const uint8_t *keys, int64_t num, int64_t k, int key) {
  if (key <= bracket->low || key >= bracket->high) return;
  int64_t found = count(keys, num, key);
  if (found >= k) bracket->low = key, bracket->at_low = found;
  else bracket->high = key, bracket->at_high = found;
}

/* Find the k-th largest key, as bracket->low. A probe extrapolates from the last one by `density`,
 * numbers per key. To bound the time every fourth probe bisects, and all do if density is 0. */
static void search(Bracket *bracket, const uint8_t *keys, int64_t num, int64_t k, double density,
                   int place) {
  for (int turn = 1; bracket->high - bracket->low > 1; turn++) {
    int low = bracket->low, high = bracket->high;
    place = place <= low ? low + 1 : place >= high ? high - 1 : place;
    narrow(bracket, keys, num, k, place);
    double above = (double)(bracket->at_low - k), below = (double)(k - 1 - bracket->at_high);
    if (density == 0 || turn % 4 == 0) place = (bracket->low + bracket->high) / 2;
    else if (bracket->low == place) place += 1 + (int)(above / density);
    else place -= 1 + (int)(below / density);
  }
}

/* Find the k-th largest short: the upper byte, then the lower byte among equal upper bytes. */
static int kth_short(const uint16_t *values, int64_t num, int64_t k, uint8_t *keys) {
  Bracket upper = {0, 256, num, 0};
  for (int64_t i = 0; i < num; i++) keys[i] = (uint8_t)(values[i] >> 8);
  pad(keys, num);
  search(&upper, keys, num, k, 0, 128);
  Bracket lower = {0, 256, upper.at_low - upper.at_high, 0};
  for (int64_t i = 0; i < num; i++) keys[i] = values[i] >> 8 == upper.low ? (uint8_t)values[i] : 0;
  search(&lower, keys, num, k - upper.at_high, 0, 128);
  return upper.low << 8 | lower.low;
}

static int64_t gather(const Bits *bits, const uint8_t *keys, int64_t num, int key, uint16_t *out) {
  int64_t found = 0;
  for (int64_t i = 0; i < num; i++) {
    out[found] = (uint16_t)bits[i];
    found += keys[i] == key;
  }
  return found;
}

INLINE int any(Bytes mask) { return (((Longs)mask)[0] | ((Longs)mask)[1]) != 0; }

/* Collect the lower 16 bits of the numbers with this key, which are rare: skip groups without. */
static int64_t lower_bits(const Bits *bits, const uint8_t *keys, int64_t num, int key,
                          uint16_t *out) {
  const Bytes wanted = (Bytes){0} + (uint8_t)key;
  int64_t found = 0;
  for (int64_t i = 0; i < num; i += GROUP) {
    Bytes hits[4];
    for (int j = 0; j < 4; j++) hits[j] = (Bytes)(*(const Bytes *)(keys + i + 16 * j) == wanted);
    if (!any(hits[0] | hits[1] | hits[2] | hits[3])) continue;
    for (int64_t j = 0; j < 4; j++) {
      int64_t at = i + 16 * j, length = num - at < 16 ? num - at : 16;
      if (any(hits[j])) found += gather(bits + at, keys + at, length, key, out + found);
    }
  }
  return found;
}

/* Convert signed shorts to bytes, clamped to 0 .. 255. */
INLINE Bytes saturate(Shorts x, Shorts y) {
#if defined(__aarch64__)
  return (Bytes)vqmovun_high_s16(vqmovun_s16((int16x8_t)x), (int16x8_t)y);
#elif defined(__SSE2__)
  return (Bytes)_mm_packus_epi16((__m128i)x, (__m128i)y);
#else
  Bytes bytes;
  for (int i = 0; i < 16; i++) {
    int value = (int16_t)(i < 8 ? x[i] : y[i - 8]);
    bytes[i] = (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
  }
  return bytes;
#endif
}

static int upper_bits(Bits bits) { return (bits >> 16) & 0x7fff; }

INLINE Shorts eight_upper(const Bits *bits) {
  Shorts x = *(const Shorts *)bits, y = *(const Shorts *)(bits + 4);
  return (Shorts){x[1], x[3], x[5], x[7], y[1], y[3], y[5], y[7]} & 0x7fff;
}

/* Key 1 stands for the base, 0 for smaller values, 255 for values beyond a byte. */
static void make_keys(const Bits *bits, int64_t num, int base, uint8_t *keys) {
  const Shorts zero = (Shorts){0} + (uint16_t)(base - 1);
  int64_t i = 0;
  for (; i + 16 <= num; i += 16) {
    __builtin_prefetch(bits + i + 1024);
    *(Bytes *)(keys + i) = saturate(eight_upper(bits + i) - zero, eight_upper(bits + i + 8) - zero);
  }
  for (; i < num; i++) {
    int key = upper_bits(bits[i]) - (base - 1);
    keys[i] = (uint8_t)(key < 0 ? 0 : key > 255 ? 255 : key);
  }
}

/* `shorts` must have room for num + GROUP numbers, `keys` for twice as many. */
static float kth_magnitude(const Bits *bits, int64_t num, int64_t k, uint16_t *shorts,
                           uint8_t *keys) {
  int64_t stride = num / SAMPLES | 1, num_sampled = (num - 1) / stride + 1;
  for (int64_t i = 0; i < num_sampled; i++) shorts[i] = (uint16_t)upper_bits(bits[i * stride]);
  double part = (double)k / (double)num, centre = part * (double)num_sampled;
  double margin = 2 + 2 * __builtin_sqrt((double)num_sampled * part * (1 - part));
  int64_t below = (int64_t)(centre + margin), above = (int64_t)(centre - margin);
  int base = below > num_sampled ? 0 : kth_short(shorts, num_sampled, below, keys);
  int end = above < 1 ? base + 254 : kth_short(shorts, num_sampled, above, keys) + 1;
  make_keys(bits, num, base, keys);
  pad(keys, num);
  Bracket bracket = {0, 256, num, 0};
  double density = 2 * margin / (double)num_sampled * (double)num / (double)(end - base);
  search(&bracket, keys, num, k, density, 1 + (end - base) / 2);
  int upper = base - 1 + bracket.low, key = bracket.low;
  if (key == 0 || key == 255) {
    for (int64_t i = 0; i < num; i++) shorts[i] = (uint16_t)upper_bits(bits[i]);
    upper = kth_short(shorts, num, k, keys);
    bracket.at_high = 0, key = 1;
    for (int64_t i = 0; i < num; i++) {
      bracket.at_high += shorts[i] > upper;
      keys[i] = shorts[i] == upper;
    }
  }
  int64_t num_equal = lower_bits(bits, keys, num, key, shorts);
  int lower = kth_short(shorts, num_equal, k - bracket.at_high, keys);
  union { uint32_t bits; float value; } answer = {(uint32_t)upper << 16 | (uint32_t)lower};
  return answer.value;
}

/* Per stretch, the smallest of the counts[i] largest magnitudes; infinity if counts[i] is 0. */
void limits(const float *row, const int64_t *bounds, const int64_t *counts, int64_t num,
            int64_t longest, uint16_t *scratch, float *out) {
  uint8_t *keys = (uint8_t *)(scratch + longest + GROUP);
  for (int64_t i = 0; i < num; i++) {
    const Bits *bits = (const void *)(row + bounds[2 * i]);
    int64_t length = bounds[2 * i + 1] - bounds[2 * i];
    out[i] = counts[i] > 0 ? kth_magnitude(bits, length, counts[i], scratch, keys)
                           : __builtin_inff();
  }
}

/* ---- Trim or drop, elect or add --------------------------------------------------------------
 * One pass makes a child. Per stretch and parent, entries are trimmed by a limit or multiplied by
 * factors. Then the parents are added, or a sign is elected.
 */
enum { MOST_PARENTS = 8, STEP = 16 };

typedef struct {
  int64_t num_parents, num_stretches;
  const int64_t *bounds;        /* [num_stretches, 2] */
  const float *const *rows;     /* one per parent */
  const float *weights;         /* one per parent, sum 1; null: the parents are added */
  const float *limits;          /* [num_parents, num_stretches]; null: entries are dropped */
  const float *const *tables;   /* one per parent */
  const int64_t *starts;        /* [num_parents, num_stretches], places in the tables */
  float *out;
} Blend;

typedef struct {
  const float *row[MOST_PARENTS], *factor[MOST_PARENTS];
  Floats limit[MOST_PARENTS], weight[MOST_PARENTS];
} Parents;

INLINE Floats keep(Mask mask, Floats x) { return (Floats)(mask & (Mask)x); }
INLINE Floats pick(Mask mask, Floats x, Floats y) {
  return (Floats)((mask & (Mask)x) | (~mask & (Mask)y));
}
INLINE Mask reaches(Floats x, Floats limit) {
#ifdef __aarch64__ /* An instruction that compilers do not choose. */
  Mask mask;
  __asm__("facge %0.4s, %1.4s, %2.4s" : "=w"(mask) : "w"(x), "w"(limit));
  return mask;
#else
  return (Floats)((Mask)x & 0x7fffffff) >= limit;
#endif
}
INLINE Floats load(const float *from, const int num) {
  if (num == 4) return *(const Floats *)from;
  Floats x = {0};
  for (int i = 0; i < num; i++) x[i] = from[i];
  return x;
}

INLINE Floats vote(const Parents *parents, const int drops, int p, int64_t i, const int num) {
  Floats x = load(parents->row[p] + i, num);
  if (drops) return x * load(parents->factor[p] + i, num);
  return keep(reaches(x, parents->limit[p]), x);
}

INLINE Floats add(const Parents *parents, const int count, const int drops, int64_t i,
                  const int num) {
  Floats sum = vote(parents, drops, 0, i, num);
  for (int p = 1; p < count; p++) sum += vote(parents, drops, p, i, num);
  return sum;
}

/* For two parents: the weighted sum if both have its sign, else the one that does, else 0. */
INLINE Floats elect_pair(const Parents *parents, const int drops, int64_t i, const int num) {
  Floats x = vote(parents, drops, 0, i, num), y = vote(parents, drops, 1, i, num);
  Floats total = x * parents->weight[0] + y * parents->weight[1];
  Mask has_x = x * total > 0, has_y = y * total > 0;
  return pick(has_x, pick(has_y, total, x), keep(has_y, y));
}

INLINE Floats elect(const Parents *parents, const int count, const int drops, int64_t i,
                    const int num) {
  Floats total = {0}, sum = {0}, weight = {0};
  for (int p = 0; p < count; p++) total += vote(parents, drops, p, i, num) * parents->weight[p];
  for (int p = 0; p < count; p++) {
    Floats x = vote(parents, drops, p, i, num), share = keep(x * total > 0, parents->weight[p]);
    sum += x * share;
    weight += share;
  }
  return sum / (weight + 1e-30f);
}

INLINE Floats entry(const Parents *parents, const int count, const int drops, const int elects,
                    int64_t i, const int num) {
  if (!elects) return add(parents, count, drops, i, num);
  if (count == 2) return elect_pair(parents, drops, i, num);
  return elect(parents, count, drops, i, num);
}

/* Inlined with a constant `count` for two parents, with a variable one for other numbers. */
INLINE void run(const Blend *blend, const int count, const int drops, const int elects) {
  for (int64_t s = 0; s < blend->num_stretches; s++) {
    int64_t begin = blend->bounds[2 * s], length = blend->bounds[2 * s + 1] - begin, i = 0;
    float *out = blend->out + begin;
    Parents parents;
    for (int p = 0; p < count; p++) {
      int64_t place = p * blend->num_stretches + s;
      parents.row[p] = blend->rows[p] + begin;
      if (drops) parents.factor[p] = blend->tables[p] + blend->starts[place];
      else parents.limit[p] = (Floats){0} + blend->limits[place];
      if (elects) parents.weight[p] = (Floats){0} + blend->weights[p];
    }
    for (; i + STEP <= length; i += STEP) {
      if (elects)
        for (int p = 0; p < count; p++) __builtin_prefetch(parents.row[p] + i + 512);
      Floats made[STEP / 4]; /* Four at a time hide instruction latency. */
#pragma GCC unroll 4
      for (int j = 0; j < STEP / 4; j++)
        made[j] = entry(&parents, count, drops, elects, i + 4 * j, 4);
#pragma GCC unroll 4
      for (int j = 0; j < STEP / 4; j++) *(Floats *)(out + i + 4 * j) = made[j];
    }
    for (; i < length; i++) out[i] = entry(&parents, count, drops, elects, i, 1)[0];
  }
}

INLINE void run_kind(const Blend *blend, const int count) {
  if (blend->limits) run(blend, count, 0, 1);
  else if (blend->weights) run(blend, count, 1, 1);
  else run(blend, count, 1, 0);
}

void blend(const Blend *blend) {
  if (blend->num_parents == 2) run_kind(blend, 2);
  else run_kind(blend, (int)blend->num_parents);
}
