/* SPDX-License-Identifier: MIT */
/*
 * Made-up weights; see normal.h.
 *
 * 16 random bits pick one of 65536 equally likely values: 15 choose from a table of the
 * distribution's quantiles, already rounded to bf16, and one is the sign. The random bits are a
 * counter put through a mixer of 64 bits (two multiplications), so there is no state to carry on.
 */
#include <endian.h>
#include <math.h>
#include <string.h>
#include "normal.h"

#define DEVIATION 0.02
#define QUANTILES 32768
#define GOLDEN 0x9e3779b97f4a7c15u	/* 2^64 by the golden ratio: steps that lie far apart */

static uint16_t quantiles[QUANTILES];

static uint16_t bf16_from(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	/* To the nearest, and to the even one of two. */
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/*
 * The x that |N(0,1)| exceeds with a chance of (QUANTILES - i - 1/2) in QUANTILES. erfc falls ever
 * less steeply, so Newton's steps from the quantile before never overshoot.
 */
void normal_init(void)
{
	double x = 0;

	for (int i = 0; i < QUANTILES; i++) {
		double chance = (QUANTILES - i - 0.5) / QUANTILES, step;

		do {
			step = (erfc(x * M_SQRT1_2) - chance) * exp(x * x / 2) * sqrt(M_PI / 2);
			x += step;
		} while (step > 1e-9);
		quantiles[i] = bf16_from((float)(x * DEVIATION));
	}
}

static uint64_t mix(uint64_t word)
{
	word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
	word = (word ^ word >> 27) * 0x94d049bb133111ebu;
	return word ^ word >> 31;
}

uint64_t normal_key(const char *name, uint64_t seed)
{
	uint64_t key = mix(seed + GOLDEN);

	for (; *name; name++)
		key = mix(key ^ (unsigned char)*name) + GOLDEN;
	return key;
}

static uint64_t pick(uint64_t bits)
{
	return quantiles[bits >> 1 & (QUANTILES - 1)] | (bits & 1) << 15;
}

static inline uint64_t word_at(enum normal_kind kind, uint64_t key, uint64_t index)
{
	uint64_t bits = mix(key + index * GOLDEN);

	switch (kind) {
	case NORMAL_BF16:
		return pick(bits) | pick(bits >> 16) << 16 | pick(bits >> 32) << 32 |
		       pick(bits >> 48) << 48;
	case NORMAL_F32:
		return pick(bits >> 16) << 16 | pick(bits >> 48) << 48 |
		       (bits & 0x0000ffff0000ffffu);
	case NORMAL_BOOL:
		return bits & 0x0101010101010101u;
	default:
		return bits;
	}
}

/* Whole words; inlined for each kind, so that the kind is decided outside the loop. */
static inline unsigned char *words(enum normal_kind kind, uint64_t key, uint64_t index,
				   size_t count, unsigned char *to)
{
	for (size_t i = 0; i < count; i++, to += 8) {
		uint64_t word = htole64(word_at(kind, key, index + i));

		memcpy(to, &word, sizeof(word));
	}
	return to;
}

void normal_fill(enum normal_kind kind, uint64_t key, uint64_t offset, void *bytes, size_t length)
{
	unsigned char *to = bytes;

	while (length) {
		uint64_t index = offset / 8;
		size_t inside = offset % 8, piece = length & ~(size_t)7;

		if (!inside && piece) {
			switch (kind) {
			case NORMAL_BF16:
				to = words(NORMAL_BF16, key, index, piece / 8, to);
				break;
			case NORMAL_F32:
				to = words(NORMAL_F32, key, index, piece / 8, to);
				break;
			default:
				to = words(kind, key, index, piece / 8, to);
			}
		} else {
			uint64_t word = htole64(word_at(kind, key, index));

			piece = 8 - inside < length ? 8 - inside : length;
			memcpy(to, (unsigned char *)&word + inside, piece);
			to += piece;
		}
		offset += piece;
		length -= piece;
	}
}
