/* SPDX-License-Identifier: MIT */
/*
 * The loops of the coding (docs/coded.md). Symbols and rest are apart while they are worked on: an
 * array of symbols, a byte each, that the planes A, B and C are made of and become; and loops that
 * join them with the rest, or part them, which compilers turn into vectors by themselves.
 *
 * Decoding goes from the deepest plane up. The symbols of all escapes of a plane are in an array
 * when that plane is decoded, so that the i-th escape takes the i-th of them without a branch.
 *
 * PLANES_NAME is what this code is called; with PLANES_VECTOR it may use vectors by name.
 */
#include <string.h>
#include "base/planes_code.h"

#if defined(PLANES_VECTOR) && defined(__aarch64__)
#include <arm_neon.h>
#elif defined(PLANES_VECTOR) && defined(__AVX2__)
#include <immintrin.h>
#endif

#define VECTOR 16	/* values at once; arrays of symbols have so much more room */

/* Numbers at any address: tensors lie where files have them. */
typedef uint16_t __attribute__((aligned(1), may_alias)) any_u16;
typedef uint32_t __attribute__((aligned(1), may_alias)) any_u32;

struct symbols {
	uint8_t at[PLANES_CHUNK + VECTOR];
};

/* -------------------------------------------------------------------------------- checksum -- */

#define STEP 0x9e3779b1u	/* from the place of one word to that of the next */

static inline uint32_t mix(uint32_t x)
{
	x = (x ^ x >> 16) * 0x85ebca6bu;
	return x ^ x >> 13;
}

static uint32_t checksum(const void *values, size_t bytes)
{
	const any_u32 *words = values;
	uint32_t sum = 0, count = (uint32_t)(bytes / 4), place = 0, last = 0;

	/* Two products less for each word than the page has: places go by steps, and what each x is
	 * multiplied with last, their sum can be. */
	for (uint32_t i = 0; i < count; i++, place += STEP)
		sum += mix(words[i] + place);
	if (bytes % 4) {
		memcpy(&last, words + count, bytes % 4);
		sum += mix(last + place);
	}
	return sum * 0xc2b2ae35u;
}

/* ---------------------------------------------------------- from planes to symbols, and back -- */

/* Puts codes into a plane that is all zeros. */
static inline void put_bits(uint8_t *plane, uint32_t i, unsigned int width, unsigned int code)
{
	uint32_t bit = i * width, byte = bit / 8, shift = bit % 8;

	plane[byte] |= (uint8_t)(code << shift);
	if (shift + width > 8)
		plane[byte + 1] |= (uint8_t)(code >> (8 - shift));
}

/* From a plane of 1, 2 or 4 bits to a byte for each value; some more than `count` are written. */
static inline void spread_bits(const uint8_t *restrict plane, unsigned int width, uint32_t count,
			       uint8_t *restrict values)
{
	unsigned int each = 8 / width, mask = (1u << width) - 1;

	for (size_t i = 0; i < (count + each - 1) / each; i++)
		for (unsigned int k = 0; k < each; k++)
			values[i * each + k] = plane[i] >> k * width & mask;
}

/* The way back, into a plane that is all zeros. */
static inline void gather_bits(const uint8_t *restrict values, unsigned int width, uint32_t count,
			       uint8_t *restrict plane)
{
	unsigned int each = 8 / width;

	for (size_t i = 0; i < count / each; i++) {
		uint8_t byte = 0;

		for (unsigned int k = 0; k < each; k++)
			byte |= (uint8_t)(values[i * each + k] << k * width);
		plane[i] = byte;
	}
	for (uint32_t i = count / each * each; i < count; i++)
		put_bits(plane, i, width, values[i]);
}

/* The symbols of the values that escape from a plane: `count` of them, and after these as many
 * zeros as are looked at once. */
struct escapes {
	const uint8_t *symbols;
	uint32_t count;
};

/*
 * The symbols of `count` codes in a plane of 2 bits, from value `from` on, before which `taken`
 * escapes lie: s has the symbols of 0, 1 and 2. However many escapes the plane claims to have, no
 * more than there are are taken, and then zeros.
 */
static void merge_two_bits(const uint8_t *restrict plane, uint32_t from, uint32_t taken,
			   uint32_t count, const uint8_t s[3], struct escapes deeper,
			   uint8_t *restrict symbols)
{
	uint8_t table[4] = { s[0], s[1], s[2], 0 };

	for (uint32_t i = from; i < count; i++) {
		unsigned int code = plane[i / 4] >> i % 4 * 2 & 3, is_escape = code == 3;

		/* A branch would be guessed wrongly for every fourth value; table[3] is 0. */
		symbols[i] = table[code] | (deeper.symbols[taken] & (uint8_t)-is_escape);
		taken += is_escape & (taken < deeper.count);
	}
}

#ifdef PLANES_VECTOR
static inline uint32_t at_most(uint32_t number, uint32_t most)
{
	return number < most ? number : most;
}
#endif

#if defined(PLANES_VECTOR) && defined(__aarch64__)

static const uint8_t spread[16] = { 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3 };
static const int8_t shifts[16] = { 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6, 0, -2, -4, -6 };

static void two_bits(const uint8_t *restrict plane, uint32_t count, const uint8_t s[3],
		     struct escapes deeper, uint8_t *restrict symbols)
{
	const uint8_t table[16] = { s[0], s[1], s[2] };
	const uint8x16_t of_code = vld1q_u8(table), byte_of = vld1q_u8(spread);
	const uint8x16_t three = vdupq_n_u8(3), none = vdupq_n_u8(0);
	const int8x16_t shift = vld1q_s8(shifts);
	uint32_t i = 0, taken = 0;

#pragma GCC unroll 4
	for (; i + VECTOR <= count; i += VECTOR) {
		uint32_t word = *(const any_u32 *)(plane + i / 4);
		uint8x16_t bytes = vqtbl1q_u8(vreinterpretq_u8_u32(vdupq_n_u32(word)), byte_of);
		uint8x16_t codes = vandq_u8(vshlq_u8(bytes, shift), three);
		uint8x16_t escapes = vceqq_u8(codes, three);
		/* How many escapes there are up to each value, that one included. */
		uint8x16_t up_to = vshrq_n_u8(escapes, 7);
		uint8x16_t others = vld1q_u8(deeper.symbols + taken);

		up_to = vaddq_u8(up_to, vextq_u8(none, up_to, 15));
		up_to = vaddq_u8(up_to, vextq_u8(none, up_to, 14));
		up_to = vaddq_u8(up_to, vextq_u8(none, up_to, 12));
		up_to = vaddq_u8(up_to, vextq_u8(none, up_to, 8));
		taken = at_most(taken + vgetq_lane_u8(up_to, 15), deeper.count);
		/* Escapes have all bits set, which is -1: so the first one takes others[0]. */
		others = vqtbl1q_u8(others, vaddq_u8(up_to, escapes));
		vst1q_u8(symbols + i, vbslq_u8(escapes, others, vqtbl1q_u8(of_code, codes)));
	}
	merge_two_bits(plane, i, taken, count, s, deeper, symbols);
}

#elif defined(PLANES_VECTOR) && defined(__AVX2__)

static void two_bits(const uint8_t *restrict plane, uint32_t count, const uint8_t s[3],
		     struct escapes deeper, uint8_t *restrict symbols)
{
	const __m128i of_code = _mm_setr_epi8((char)s[0], (char)s[1], (char)s[2], 0, 0, 0, 0, 0, 0,
					      0, 0, 0, 0, 0, 0, 0);
	const __m128i in_order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11,
					       15);
	const __m128i shift = _mm_setr_epi32(0, 2, 4, 6), three = _mm_set1_epi8(3);
	uint32_t i = 0, taken = 0;

	for (; i + VECTOR <= count; i += VECTOR) {
		int word = (int)*(const any_u32 *)(plane + i / 4);
		/* Byte b of the k-th word has the code of value 4 * b + k. */
		__m128i words = _mm_srlv_epi32(_mm_set1_epi32(word), shift);
		__m128i codes = _mm_shuffle_epi8(_mm_and_si128(words, three), in_order);
		__m128i escapes = _mm_cmpeq_epi8(codes, three);
		/* How many escapes there are up to each value, that one included. */
		__m128i up_to = _mm_sub_epi8(_mm_setzero_si128(), escapes);
		__m128i others = _mm_loadu_si128((const __m128i *)(deeper.symbols + taken));

		up_to = _mm_add_epi8(up_to, _mm_slli_si128(up_to, 1));
		up_to = _mm_add_epi8(up_to, _mm_slli_si128(up_to, 2));
		up_to = _mm_add_epi8(up_to, _mm_slli_si128(up_to, 4));
		up_to = _mm_add_epi8(up_to, _mm_slli_si128(up_to, 8));
		taken += (uint32_t)__builtin_popcount((unsigned int)_mm_movemask_epi8(escapes));
		taken = at_most(taken, deeper.count);
		/* Escapes have all bits set, which is -1: so the first one takes others[0]. */
		others = _mm_shuffle_epi8(others, _mm_add_epi8(up_to, escapes));
		_mm_storeu_si128((__m128i *)(symbols + i),
				 _mm_blendv_epi8(_mm_shuffle_epi8(of_code, codes), others,
						 escapes));
	}
	merge_two_bits(plane, i, taken, count, s, deeper, symbols);
}

#else

static void two_bits(const uint8_t *restrict plane, uint32_t count, const uint8_t s[3],
		     struct escapes deeper, uint8_t *restrict symbols)
{
	merge_two_bits(plane, 0, 0, count, s, deeper, symbols);
}

#endif

/* The symbols of escapes from B: few, and hardly one of them escapes again. */
static void three_bits(const uint8_t *plane, uint32_t count, const uint8_t s[7],
		       const uint8_t *bytes, uint32_t byte_count, uint8_t *symbols)
{
	uint32_t taken = 0;

	for (uint32_t i = 0; i < count; i += 8, plane += 3) {
		uint32_t left = count - i < 8 ? count - i : 8, codes = plane[0];

		/* Of the last ones there are as many bytes as they need. */
		if (left > 2)
			codes |= (uint32_t)plane[1] << 8;
		if (left > 5)
			codes |= (uint32_t)plane[2] << 16;
		for (uint32_t k = 0; k < left; k++, codes >>= 3) {
			if ((codes & 7) < 7)
				symbols[i + k] = s[codes & 7];
			else
				symbols[i + k] = taken < byte_count ? bytes[taken++] : 0;
		}
	}
}

static void decode_symbols(const uint8_t *stored, const struct planes_parts *parts,
			   const uint16_t escapes[3], uint32_t count, struct symbols *symbols)
{
	struct symbols b, c;
	uint8_t s[PLANES_SYMBOLS];

	memcpy(s, stored, sizeof(s));
	three_bits(stored + parts->c, escapes[1], s + 6, stored + parts->d, escapes[2], c.at);
	memset(c.at + escapes[1], 0, VECTOR);
	two_bits(stored + parts->b, escapes[0], s + 3, (struct escapes){ c.at, escapes[1] }, b.at);
	memset(b.at + escapes[0], 0, VECTOR);
	two_bits(stored + parts->a, count, s, (struct escapes){ b.at, escapes[0] }, symbols->at);
}

/* The codes in one plane; where a symbol is there twice, being 0, the first counts. */
static void codes_of(const uint8_t *s, unsigned int count, uint8_t code_of[256])
{
	memset(code_of, (int)count, 256);
	for (unsigned int i = count; i-- > 0;)
		code_of[s[i]] = (uint8_t)i;
}

#ifdef PLANES_VECTOR

/* Of four values those that escape, by a bit each, two apart: their numbers, and how many. */
static const struct {
	uint32_t numbers, count;
} together[0x56] = {
	[0x01] = { 0x00, 1 }, [0x04] = { 0x01, 1 }, [0x05] = { 0x0100, 2 }, [0x10] = { 0x02, 1 },
	[0x11] = { 0x0200, 2 }, [0x14] = { 0x0201, 2 }, [0x15] = { 0x020100, 3 },
	[0x40] = { 0x03, 1 }, [0x41] = { 0x0300, 2 }, [0x44] = { 0x0301, 2 },
	[0x45] = { 0x030100, 3 }, [0x50] = { 0x0302, 2 }, [0x51] = { 0x030200, 3 },
	[0x54] = { 0x030201, 3 }, [0x55] = { 0x03020100, 4 },
};

/* Leaves the escapes among VECTOR values, whose codes are `word`, in `deeper`; returns its end. */
static inline uint8_t *put_escapes(const uint8_t *symbols, uint32_t word, uint8_t *deeper)
{
	uint32_t escapes = word & word >> 1 & 0x55555555;

	for (unsigned int i = 0; i < VECTOR; i += 8, escapes >>= 16) {
		uint32_t low = escapes & 0xff, high = escapes >> 8 & 0xff;
		uint64_t order = (uint64_t)(together[high].numbers + 0x04040404) << 32 |
				 together[low].numbers;
#ifdef __aarch64__
		uint32x2_t moved = vreinterpret_u32_u8(vtbl1_u8(vld1_u8(symbols + i),
								vcreate_u8(order)));

		*(any_u32 *)deeper = vget_lane_u32(moved, 0);
		deeper += together[low].count;
		*(any_u32 *)deeper = vget_lane_u32(moved, 1);
#else
		__m128i moved = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i *)(symbols + i)),
						 _mm_cvtsi64_si128((long long)order));

		*(any_u32 *)deeper = (uint32_t)_mm_extract_epi32(moved, 0);
		deeper += together[low].count;
		*(any_u32 *)deeper = (uint32_t)_mm_extract_epi32(moved, 1);
#endif
		deeper += together[high].count;
	}
	return deeper;
}

/* The codes of VECTOR symbols, as they lie in a plane. */
static inline uint32_t codes_at(const uint8_t *symbols, const uint8_t s[3])
{
#ifdef __aarch64__
	static const int8_t places[16] = { 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6, 0, 2, 4, 6 };
	uint8x16_t these = vld1q_u8(symbols), codes;

	codes = vbslq_u8(vceqq_u8(these, vdupq_n_u8(s[2])), vdupq_n_u8(2), vdupq_n_u8(3));
	codes = vbslq_u8(vceqq_u8(these, vdupq_n_u8(s[1])), vdupq_n_u8(1), codes);
	codes = vbicq_u8(codes, vceqq_u8(these, vdupq_n_u8(s[0])));
	codes = vshlq_u8(codes, vld1q_s8(places));
	codes = vpaddq_u8(codes, codes);
	codes = vpaddq_u8(codes, codes);
	return vgetq_lane_u32(vreinterpretq_u32_u8(codes), 0);
#else
	__m128i these = _mm_loadu_si128((const __m128i *)symbols), codes, bytes;

	codes = _mm_blendv_epi8(_mm_set1_epi8(3), _mm_set1_epi8(2),
				_mm_cmpeq_epi8(these, _mm_set1_epi8((char)s[2])));
	codes = _mm_blendv_epi8(codes, _mm_set1_epi8(1),
				_mm_cmpeq_epi8(these, _mm_set1_epi8((char)s[1])));
	codes = _mm_andnot_si128(_mm_cmpeq_epi8(these, _mm_set1_epi8((char)s[0])), codes);
	bytes = _mm_madd_epi16(_mm_maddubs_epi16(codes, _mm_set1_epi16(0x0401)),
			       _mm_set1_epi32(0x00100001));
	bytes = _mm_shuffle_epi8(bytes, _mm_set1_epi32(0x0c080400));
	return (uint32_t)_mm_cvtsi128_si32(bytes);
#endif
}

#endif

/* One plane of 2 bits, all zeros before, of symbols; those that escape are left in `deeper`. */
static void put_two_bits(const uint8_t *symbols, uint32_t count, const uint8_t s[3],
			 uint8_t *plane, uint8_t *deeper)
{
	uint8_t code_of[256];
	uint32_t i = 0;

#ifdef PLANES_VECTOR
	for (; i + VECTOR <= count; i += VECTOR) {
		uint32_t word = codes_at(symbols + i, s);

		*(any_u32 *)(plane + i / 4) = word;
		deeper = put_escapes(symbols + i, word, deeper);
	}
#endif
	codes_of(s, 3, code_of);
	for (; i + 4 <= count; i += 4) {
		unsigned int byte = 0;

		for (unsigned int k = 0; k < 4; k++) {
			unsigned int code = code_of[symbols[i + k]];

			byte |= code << 2 * k;
			*deeper = symbols[i + k];
			deeper += code == 3;
		}
		plane[i / 4] = (uint8_t)byte;
	}
	for (; i < count; i++) {
		unsigned int code = code_of[symbols[i]];

		put_bits(plane, i, 2, code);
		*deeper = symbols[i];
		deeper += code == 3;
	}
}

static void put_three_bits(const uint8_t *symbols, uint32_t count, const uint8_t code_of[256],
			   uint8_t *plane, uint8_t *bytes)
{
	for (uint32_t i = 0; i < count; i++) {
		uint8_t code = code_of[symbols[i]];

		put_bits(plane, i, 3, code);
		if (code == 7)
			*bytes++ = symbols[i];
	}
}

/* ----------------------------------------------------------------- values, symbols and rest -- */

static inline uint16_t join_bf16(uint8_t symbol, uint8_t rest)
{
	return (uint16_t)((rest & 0x80) << 8 | symbol << 7 | (rest & 0x7f));
}

/* All of BF16. Byte by byte, so that more of them fit into a vector. */
static void join_all_bf16(const uint8_t *restrict symbols, const uint8_t *restrict rest,
			  size_t count, uint8_t *restrict bytes)
{
	size_t i = 0;

#if defined(PLANES_VECTOR) && defined(__aarch64__)
	/* Compilers make four vectors of what can be two: shift, and insert into the rest. */
	for (; i + VECTOR <= count; i += VECTOR) {
		uint8x16_t symbol = vld1q_u8(symbols + i), other = vld1q_u8(rest + i);
		uint8x16_t low = vsliq_n_u8(other, symbol, 7), high = vsriq_n_u8(other, symbol, 1);

		vst1q_u8(bytes + 2 * i, vzip1q_u8(low, high));
		vst1q_u8(bytes + 2 * i + VECTOR, vzip2q_u8(low, high));
	}
#endif
	for (; i < count; i++) {
		bytes[2 * i] = (uint8_t)(symbols[i] << 7 | (rest[i] & 0x7f));
		bytes[2 * i + 1] = (uint8_t)((rest[i] & 0x80) | symbols[i] >> 1);
	}
}

static void join(enum planes_kind kind, const uint8_t *restrict symbols, const uint8_t *stored,
		 const uint32_t rest[PLANES_RESTS], uint32_t count, void *values)
{
	const uint8_t *restrict first = stored + rest[0], *restrict second = stored + rest[1];
	const uint8_t *restrict third = stored + rest[2];
	const any_u16 *restrict low = (const any_u16 *)first;
	any_u16 *restrict halves = values;
	any_u32 *restrict words = values;
	uint8_t *restrict bytes = values;
	struct symbols low_bits, sign;

	switch (kind) {
	case PLANES_BF16:
		join_all_bf16(symbols, first, count, bytes);
		break;
	case PLANES_F32:
		for (uint32_t i = 0; i < count; i++)
			words[i] = (uint32_t)join_bf16(symbols[i], second[i]) << 16 | low[i];
		break;
	case PLANES_F16:
		spread_bits(second, 2, count, low_bits.at);
		spread_bits(third, 1, count, sign.at);
		for (uint32_t i = 0; i < count; i++)
			halves[i] = (uint16_t)(sign.at[i] << 15 | (symbols[i] & 31) << 10 |
					       low_bits.at[i] << 8 | first[i]);
		break;
	case PLANES_E4M3:
		spread_bits(first, 4, count, low_bits.at);
		for (uint32_t i = 0; i < count; i++)
			bytes[i] = (uint8_t)((low_bits.at[i] & 8) << 4 | (symbols[i] & 15) << 3 |
					     (low_bits.at[i] & 7));
		break;
	case PLANES_E5M2:
		spread_bits(first, 2, count, low_bits.at);
		spread_bits(second, 1, count, sign.at);
		for (uint32_t i = 0; i < count; i++)
			bytes[i] = (uint8_t)(sign.at[i] << 7 | (symbols[i] & 31) << 2 |
					     low_bits.at[i]);
		break;
	default:
		break;
	}
}

static void take_symbols(enum planes_kind kind, const void *values, uint32_t count,
			 uint8_t *symbols)
{
	const any_u16 *halves = values;
	const any_u32 *words = values;
	const uint8_t *bytes = values;

	switch (kind) {
	case PLANES_BF16:
		for (uint32_t i = 0; i < count; i++)
			symbols[i] = (uint8_t)(halves[i] >> 7);
		break;
	case PLANES_F32:
		for (uint32_t i = 0; i < count; i++)
			symbols[i] = (uint8_t)(words[i] >> 23);
		break;
	case PLANES_F16:
		for (uint32_t i = 0; i < count; i++)
			symbols[i] = halves[i] >> 10 & 31;
		break;
	case PLANES_E4M3:
		for (uint32_t i = 0; i < count; i++)
			symbols[i] = bytes[i] >> 3 & 15;
		break;
	case PLANES_E5M2:
		for (uint32_t i = 0; i < count; i++)
			symbols[i] = bytes[i] >> 2 & 31;
		break;
	default:
		break;
	}
}

/* The planes of less than a byte are all zeros before. */
static void take_rest(enum planes_kind kind, const void *values, uint32_t count, uint8_t *stored,
		      const uint32_t rest[PLANES_RESTS])
{
	uint8_t *first = stored + rest[0], *second = stored + rest[1], *third = stored + rest[2];
	const any_u16 *halves = values;
	const any_u32 *words = values;
	const uint8_t *bytes = values;
	any_u16 *low = (any_u16 *)first;
	struct symbols low_bits, sign;

	switch (kind) {
	case PLANES_BF16:
		for (uint32_t i = 0; i < count; i++)
			first[i] = (uint8_t)((halves[i] >> 8 & 0x80) | (halves[i] & 0x7f));
		break;
	case PLANES_F32:
		for (uint32_t i = 0; i < count; i++) {
			low[i] = (uint16_t)words[i];
			second[i] = (uint8_t)((words[i] >> 24 & 0x80) | (words[i] >> 16 & 0x7f));
		}
		break;
	case PLANES_F16:
		for (uint32_t i = 0; i < count; i++) {
			first[i] = (uint8_t)halves[i];
			low_bits.at[i] = halves[i] >> 8 & 3;
			sign.at[i] = (uint8_t)(halves[i] >> 15);
		}
		gather_bits(low_bits.at, 2, count, second);
		gather_bits(sign.at, 1, count, third);
		break;
	case PLANES_E4M3:
		for (uint32_t i = 0; i < count; i++)
			low_bits.at[i] = (bytes[i] >> 4 & 8) | (bytes[i] & 7);
		gather_bits(low_bits.at, 4, count, first);
		break;
	case PLANES_E5M2:
		for (uint32_t i = 0; i < count; i++) {
			low_bits.at[i] = bytes[i] & 3;
			sign.at[i] = bytes[i] >> 7;
		}
		gather_bits(low_bits.at, 2, count, first);
		gather_bits(sign.at, 1, count, second);
		break;
	default:
		break;
	}
}

/* --------------------------------------------------------------------------------- encoding -- */

/* How often each symbol is there. Four counts, so that runs of one symbol do not wait for it. */
static void count_symbols(const uint8_t *symbols, uint32_t count, uint32_t often[256])
{
	uint32_t part[4][256] = { 0 };
	uint32_t i = 0;

	for (; i + 4 <= count; i += 4) {
		uint32_t four = *(const any_u32 *)(symbols + i);

		for (unsigned int k = 0; k < 4; k++)
			part[k][four >> 8 * k & 0xff]++;
	}
	for (; i < count; i++)
		part[0][symbols[i]]++;
	for (unsigned int k = 0; k < 256; k++)
		often[k] = part[0][k] + part[1][k] + part[2][k] + part[3][k];
}

/* The commonest symbols, and how many values none of the planes so far has a code for. */
static void choose_symbols(uint32_t often[256], uint32_t count, uint8_t s[PLANES_SYMBOLS],
			   uint16_t escapes[3])
{
	uint8_t there[256];
	unsigned int there_count = 0;

	for (unsigned int k = 0; k < 256; k++)
		if (often[k])
			there[there_count++] = (uint8_t)k;
	for (unsigned int i = 0; i < PLANES_SYMBOLS; i++) {
		unsigned int best = 0;

		for (unsigned int k = 0; k < there_count; k++)
			if (often[there[k]] > often[best])
				best = there[k];
		s[i] = often[best] ? (uint8_t)best : 0;
		count -= often[best];
		often[best] = 0;
		if (i == 2 || i == 5 || i == PLANES_SYMBOLS - 1)
			escapes[i / 3 < 3 ? i / 3 : 2] = (uint16_t)count;
	}
}

static void encode(enum planes_kind kind, const void *values, uint32_t count, void *stored,
		   struct planes_chunk *chunk)
{
	uint32_t bytes = count * planes_shapes[kind].bytes;
	uint8_t s[PLANES_SYMBOLS], code_of[256], *to = stored;
	struct symbols a, b, c;
	struct planes_parts parts;
	uint32_t often[256];

	*chunk = (struct planes_chunk){ .checksum = checksum(values, bytes) };
	take_symbols(kind, values, count, a.at);
	count_symbols(a.at, count, often);
	choose_symbols(often, count, s, chunk->escapes);
	planes_parts(kind, count, chunk->escapes, &parts);
	if (parts.end >= planes_plain(kind, count)) {
		memset(chunk->escapes, 0, sizeof(chunk->escapes));
		chunk->bytes = planes_plain(kind, count);
		memcpy(to, values, bytes);
		memset(to + bytes, 0, chunk->bytes - bytes);
		return;
	}
	chunk->coded = PLANES_CODED;
	chunk->bytes = parts.end;
	memset(to, 0, parts.end);
	memcpy(to, s, sizeof(s));
	take_rest(kind, values, count, to, parts.rest);
	put_two_bits(a.at, count, s, to + parts.a, b.at);
	put_two_bits(b.at, chunk->escapes[0], s + 3, to + parts.b, c.at);
	codes_of(s + 6, 7, code_of);
	put_three_bits(c.at, chunk->escapes[1], code_of, to + parts.c, to + parts.d);
}

/* --------------------------------------------------------------------------------- decoding -- */

static bool decode(enum planes_kind kind, const void *stored, const struct planes_chunk *chunk,
		   uint32_t count, void *values)
{
	uint32_t bytes = count * planes_shapes[kind].bytes;
	struct planes_parts parts;
	struct symbols symbols;

	if (chunk->coded == PLANES_PLAIN) {
		memcpy(values, stored, bytes);
	} else {
		planes_parts(kind, count, chunk->escapes, &parts);
		decode_symbols(stored, &parts, chunk->escapes, count, &symbols);
		join(kind, symbols.at, stored, parts.rest, count, values);
	}
	return checksum(values, bytes) == chunk->checksum;
}

#define JOIN(a, b) a##b
#define CODE(name) JOIN(planes_code_, name)
#define TEXT(name) #name
#define SHOWN(name) TEXT(name)

const struct planes_code CODE(PLANES_NAME) = {
	.name = SHOWN(PLANES_NAME),
	.checksum = checksum,
	.encode = encode,
	.decode = decode,
};
