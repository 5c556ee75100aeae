/* SPDX-License-Identifier: MIT */
/*
 * The table of digests. Which XXH3 this CPU runs fastest, and the powers that join CRC32s, are
 * settled when the program is loaded, before there can be a second thread in here, so that the
 * tables are never written afterwards.
 */
#include <errno.h>
#include <libdeflate.h>
#include "base/digest.h"
#include "base/digest_xxh3.h"
#include "base/error.h"

/* The polynomial of CRC32 without its highest term, x^0 in the highest bit, as in a CRC itself. */
#define CRC32_POLYNOMIAL 0xedb88320u
#define CRC32_X_TO_0 0x80000000u
#define CRC32_X_TO_8 (CRC32_X_TO_0 >> 8)

static uint64_t crc32_of(const void *bytes, size_t length)
{
	return libdeflate_crc32(0, bytes, length);
}

static struct digest_kind kinds[] = {
	[PEN_DIGEST_XXH3] = { "xxh3-64", 64, digest_xxh3_baseline },
	[PEN_DIGEST_CRC32] = { "crc32", 32, crc32_of },
};

size_t digest_xxh3_usable(digest_xxh3_function *usable[DIGEST_XXH3_MAX])
{
	size_t count = 0;

#ifdef __x86_64__
	if (__builtin_cpu_supports("avx512f"))
		usable[count++] = digest_xxh3_avx512;
	if (__builtin_cpu_supports("avx2"))
		usable[count++] = digest_xxh3_avx2;
#endif
	usable[count++] = digest_xxh3_baseline;
	return count;
}

/* The product of two polynomials, modulo that of CRC32. */
static uint32_t crc32_product(uint32_t left, uint32_t right)
{
	uint32_t product = 0;

	for (uint32_t term = CRC32_X_TO_0; term; term >>= 1) {
		product ^= left & term ? right : 0;
		right = right >> 1 ^ (right & 1 ? CRC32_POLYNOMIAL : 0);
	}
	return product;
}

/* What 2^i bytes multiply by: a join of whole chunks is one product, not twenty squarings. */
static uint32_t crc32_powers[64];

__attribute__((constructor)) static void settle_tables(void)
{
	digest_xxh3_function *usable[DIGEST_XXH3_MAX];

	digest_xxh3_usable(usable);
	kinds[PEN_DIGEST_XXH3].of = usable[0];
	crc32_powers[0] = CRC32_X_TO_8;
	for (size_t i = 1; i < 64; i++)
		crc32_powers[i] = crc32_product(crc32_powers[i - 1], crc32_powers[i - 1]);
}

const struct digest_kind *digest_kind(int kind)
{
	/* PEN_DIGEST_NONE has a row, but no name. */
	if (kind < 0 || kind >= (int)(sizeof(kinds) / sizeof(kinds[0])) || !kinds[kind].name)
		return NULL;
	return &kinds[kind];
}

/*
 * Bytes that follow multiply what a CRC has seen so far by x^8 each, and add their own. What a CRC
 * starts and ends with to see leading zeros is in both CRCs, and cancels out.
 */
uint64_t digest_crc32_join(uint64_t first, uint64_t second, uint64_t second_length)
{
	uint32_t shifted = (uint32_t)first;

	for (size_t i = 0; i < 64 && second_length >> i; i++)
		if (second_length >> i & 1)
			shifted = crc32_product(shifted, crc32_powers[i]);
	return shifted ^ (uint32_t)second;
}

const char *pen_digest_name(int kind)
{
	const struct digest_kind *found = digest_kind(kind);

	return found ? found->name : NULL;
}

int pen_digest_of(int kind, const void *bytes, size_t length, uint64_t *digest,
		  struct pen_error *err)
{
	const struct digest_kind *found = digest_kind(kind);

	if (!found) {
		error_set(err, -EINVAL, "compute", "a digest", -1, "%d is no kind of digest", kind);
		error_hint(err, "There are PEN_DIGEST_XXH3 (%d) and PEN_DIGEST_CRC32 (%d)",
			   PEN_DIGEST_XXH3, PEN_DIGEST_CRC32);
		return -EINVAL;
	}
	*digest = found->of(bytes, length);
	return 0;
}

uint64_t pen_digest_crc32_join(uint64_t first, uint64_t second, uint64_t second_length)
{
	return digest_crc32_join(first, second, second_length);
}
