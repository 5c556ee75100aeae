/* SPDX-License-Identifier: MIT */
/* What the coding is made of: kinds of numbers, places of parts, and which code runs here. */
#include "base/planes.h"
#include "base/planes_code.h"

const struct planes_shape planes_shapes[PLANES_KINDS] = {
	[PLANES_BF16] = { .bytes = 2, .mantissa = 7, .symbol = 8 },
	[PLANES_F32] = { .bytes = 4, .mantissa = 23, .symbol = 8 },
	[PLANES_F16] = { .bytes = 2, .mantissa = 10, .symbol = 5 },
	[PLANES_E4M3] = { .bytes = 1, .mantissa = 3, .symbol = 4 },
	[PLANES_E5M2] = { .bytes = 1, .mantissa = 2, .symbol = 5 },
};

_Static_assert(sizeof(struct planes_chunk) == 16, "as it lies in files");

void planes_widths(enum planes_kind kind, unsigned int widths[PLANES_RESTS])
{
	unsigned int rest = planes_shapes[kind].mantissa + 1, count = 0;

	for (unsigned int i = 0; i < PLANES_RESTS; i++)
		widths[i] = 0;
	for (unsigned int width = 16; width; width /= 2)
		if (rest & width)
			widths[count++] = width;
}

static uint32_t filled_up(uint32_t bytes)
{
	return (bytes + PLANES_ALIGN - 1) / PLANES_ALIGN * PLANES_ALIGN;
}

static uint32_t plane(uint32_t values, unsigned int width)
{
	return filled_up((values * width + 7) / 8);
}

void planes_parts(enum planes_kind kind, uint32_t values, const uint16_t escapes[3],
		  struct planes_parts *parts)
{
	unsigned int widths[PLANES_RESTS];
	uint32_t at = filled_up(PLANES_SYMBOLS);

	planes_widths(kind, widths);
	for (unsigned int i = 0; i < PLANES_RESTS; i++) {
		parts->rest[i] = at;
		at += plane(values, widths[i]);
	}
	parts->a = at;
	parts->b = parts->a + plane(values, 2);
	parts->c = parts->b + plane(escapes[0], 2);
	parts->d = parts->c + plane(escapes[1], 3);
	parts->end = parts->d + plane(escapes[2], 8);
}

uint32_t planes_plain(enum planes_kind kind, uint32_t values)
{
	return filled_up(values * planes_shapes[kind].bytes);
}

/* Where plane B begins. Full chunks are nearly all, and have no ends to fill up. */
static uint32_t head(enum planes_kind kind, uint32_t values)
{
	static const uint16_t none[3];
	struct planes_parts parts;

	if (values == PLANES_CHUNK)
		return filled_up(PLANES_SYMBOLS) +
		       PLANES_CHUNK / 8 * (planes_shapes[kind].mantissa + 3);
	planes_parts(kind, values, none, &parts);
	return parts.b;
}

bool planes_check(enum planes_kind kind, uint32_t values, const struct planes_chunk *chunk)
{
	const uint16_t *escapes = chunk->escapes;
	uint32_t end;

	if (chunk->coded == PLANES_PLAIN)
		return !escapes[0] && !escapes[1] && !escapes[2] &&
		       chunk->bytes == planes_plain(kind, values);
	if (chunk->coded != PLANES_CODED || values > PLANES_CHUNK || escapes[0] > values ||
	    escapes[1] > escapes[0] || escapes[2] > escapes[1])
		return false;
	end = head(kind, values) + plane(escapes[0], 2) + plane(escapes[1], 3) +
	      plane(escapes[2], 8);
	/* What would not be smaller is kept plain; decoders count on the room that this bounds. */
	return chunk->bytes == end && end < planes_plain(kind, values);
}

size_t planes_usable(const struct planes_code *usable[PLANES_CODES])
{
	size_t count = 0;

#ifdef __x86_64__
	if (__builtin_cpu_supports("avx2"))
		usable[count++] = &planes_code_vector;
#elif defined(__aarch64__)
	usable[count++] = &planes_code_vector;
#endif
	usable[count++] = &planes_code_plain;
	return count;
}

static const struct planes_code *best(void)
{
	const struct planes_code *usable[PLANES_CODES];

	planes_usable(usable);
	return usable[0];
}

uint32_t planes_checksum(const void *values, size_t bytes)
{
	return best()->checksum(values, bytes);
}

void planes_encode(enum planes_kind kind, const void *values, uint32_t count, void *stored,
		   struct planes_chunk *chunk)
{
	best()->encode(kind, values, count, stored, chunk);
}

bool planes_decode(enum planes_kind kind, const void *stored, const struct planes_chunk *chunk,
		   uint32_t count, void *values)
{
	return best()->decode(kind, stored, chunk, count, values);
}
