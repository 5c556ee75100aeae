/* SPDX-License-Identifier: MIT */
/* The kinds of numbers, in the order of enum pen_dtype: what safetensors calls them, their bits. */
#include <string.h>
#include "format/dtype.h"
#include "penstock.h"

static const struct {
	const char *name;
	unsigned int bits;
} dtypes[PEN_DTYPES] = {
	[PEN_BOOL] = { "BOOL", 8 },
	[PEN_F4] = { "F4", 4 },
	[PEN_F6_E2M3] = { "F6_E2M3", 6 },
	[PEN_F6_E3M2] = { "F6_E3M2", 6 },
	[PEN_U8] = { "U8", 8 },
	[PEN_I8] = { "I8", 8 },
	[PEN_F8_E5M2] = { "F8_E5M2", 8 },
	[PEN_F8_E4M3] = { "F8_E4M3", 8 },
	[PEN_F8_E8M0] = { "F8_E8M0", 8 },
	[PEN_F8_E4M3FNUZ] = { "F8_E4M3FNUZ", 8 },
	[PEN_F8_E5M2FNUZ] = { "F8_E5M2FNUZ", 8 },
	[PEN_I16] = { "I16", 16 },
	[PEN_U16] = { "U16", 16 },
	[PEN_F16] = { "F16", 16 },
	[PEN_BF16] = { "BF16", 16 },
	[PEN_I32] = { "I32", 32 },
	[PEN_U32] = { "U32", 32 },
	[PEN_F32] = { "F32", 32 },
	[PEN_C64] = { "C64", 64 },
	[PEN_F64] = { "F64", 64 },
	[PEN_I64] = { "I64", 64 },
	[PEN_U64] = { "U64", 64 },
};

const char *pen_dtype_name(int dtype)
{
	return dtype >= 0 && dtype < PEN_DTYPES ? dtypes[dtype].name : NULL;
}

unsigned int pen_dtype_bits(int dtype)
{
	return dtype >= 0 && dtype < PEN_DTYPES ? dtypes[dtype].bits : 0;
}

int dtype_parse(const char *name, size_t length)
{
	for (int i = 0; i < PEN_DTYPES; i++)
		if (strlen(dtypes[i].name) == length && !memcmp(dtypes[i].name, name, length))
			return i;
	return -1;
}

bool dtype_bytes(int dtype, uint64_t elements, uint64_t *bytes)
{
	uint64_t bits = pen_dtype_bits(dtype);

	/* Whole bytes are counted as such, so that only a real overflow is one. */
	if (bits % 8 == 0)
		return !__builtin_mul_overflow(elements, bits / 8, bytes);
	if (__builtin_mul_overflow(elements, bits, bytes) || *bytes % 8)
		return false;
	*bytes /= 8;
	return true;
}
