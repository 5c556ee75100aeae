/* SPDX-License-Identifier: MIT */
/*
 * Numbers in another dtype are the nearest there is, ties to even: every number of 16 bits, and of
 * 32 bits those around each place where the result changes, against arithmetic in double.
 */
#include <math.h>
#include "base/form.h"
#include "penstock.h"
#include "test.h"

/* Digits and least exponent of a dtype; what is not below `limit` is infinite. */
static const struct kind {
	int dtype, digits, least;
	double limit;
} kinds[] = {
	{ PEN_BF16, 8, -126, 0x1p128 },
	{ PEN_F16, 11, -14, 0x1p16 },
	{ PEN_F32, 24, -126, 0x1p128 },
};

static const struct kind *kind_of(int dtype)
{
	for (size_t i = 0; i < 3; i++)
		if (kinds[i].dtype == dtype)
			return &kinds[i];
	CHECK(0);
	return NULL;
}

static unsigned int bits_of(int dtype)
{
	return dtype == PEN_F32 ? 32 : 16;
}

/* What bits mean, by the definition: sign, exponent, fraction. */
static double value_of(int dtype, uint32_t bits)
{
	const struct kind *kind = kind_of(dtype);
	int fraction_bits = kind->digits - 1;
	uint32_t size = bits & ~(1u << (bits_of(dtype) - 1));
	int exponent = (int)(size >> fraction_bits), most = 3 - kind->least * 2;
	double fraction = size & ((1u << fraction_bits) - 1), value;

	if (exponent == most)
		value = fraction != 0 ? NAN : INFINITY;
	else if (!exponent)
		value = ldexp(fraction, kind->least - fraction_bits);
	else
		value = ldexp(fraction + ldexp(1, fraction_bits),
			      exponent - 1 + kind->least - fraction_bits);
	return bits >> (bits_of(dtype) - 1) ? -value : value;
}

/* The nearest number of a dtype, ties to even. */
static double nearest(int dtype, double value)
{
	const struct kind *kind = kind_of(dtype);
	int exponent;
	double step, rounded;

	if (value == 0 || !isfinite(value))
		return value;
	frexp(value, &exponent);
	exponent = exponent - 1 < kind->least ? kind->least : exponent - 1;
	step = ldexp(1, exponent - (kind->digits - 1));
	rounded = nearbyint(value / step) * step;
	return fabs(rounded) >= kind->limit ? copysign(INFINITY, value) : rounded;
}

static void check_number(const struct form *form, uint32_t from)
{
	uint16_t from_half = (uint16_t)from, to_half = 0;
	uint32_t to_single = 0, to;
	double expected = nearest(form->to, value_of(form->from, from)), got;

	form->apply(form->to_size == 2 ? (void *)&to_half : &to_single,
		    form->from_size == 2 ? (void *)&from_half : &from, 1);
	to = form->to_size == 2 ? to_half : to_single;
	got = value_of(form->to, to);
	if (isnan(expected) ? !isnan(got)
			    : got != expected || !signbit(got) != !signbit(expected)) {
		fprintf(stderr, "%s: %08x became %08x\n", form->kernel, from, to);
		exit(1);
	}
}

TEST(every_number_of_16_bits_becomes_the_nearest_of_another_dtype)
{
	for (uint64_t number = 1; number < PEN_FORMS; number++)
		for (uint32_t bits = 0; form_of(number)->from_size == 2 && bits < 0x10000; bits++)
			check_number(form_of(number), bits);
}

TEST(numbers_of_32_bits_become_the_nearest_on_both_sides_of_every_tie)
{
	for (uint64_t number = 1; number < PEN_FORMS; number++) {
		const struct form *form = form_of(number);

		if (form->from_size != 4)
			continue;
		/* A tie of fp16 lies 12 bits deep, one of bf16 15, and subnormal ones deeper. */
		for (uint32_t high = 0; high < 0x100000; high++)
			for (uint32_t low = 0; low < 3; low++)
				check_number(form, (high << 12) + low - 1);
	}
}

TEST(many_numbers_become_what_each_becomes_alone)
{
	static uint32_t from[1000], to[1000];
	uint64_t seed = 7;

	for (size_t i = 0; i < sizeof(from) / 4; i++) {
		seed = seed * 6364136223846793005ull + 1442695040888963407ull;
		from[i] = (uint32_t)(seed >> 32);
	}
	for (uint64_t number = 1; number < PEN_FORMS; number++) {
		const struct form *form = form_of(number);

		for (size_t count = 0; count < 70; count++) {
			unsigned char one[4];

			memset(to, 0xee, sizeof(to));
			form->apply((char *)to + form->to_size, (char *)from + form->from_size,
				    count);
			for (size_t i = 1; i <= count; i++) {
				form->apply(one, (char *)from + i * form->from_size, 1);
				CHECK(!memcmp(one, (char *)to + i * form->to_size, form->to_size));
			}
			CHECK_EQ(((unsigned char *)to)[form->to_size - 1], 0xee);
			CHECK_EQ(((unsigned char *)to)[(count + 1) * form->to_size], 0xee);
		}
	}
}

TEST(forms_are_found_by_their_dtypes)
{
	CHECK_EQ(pen_form_find(PEN_BF16, PEN_F32), PEN_FORM_BF16_TO_F32);
	CHECK_EQ(pen_form_find(PEN_F16, PEN_F16), PEN_FORM_PLAIN);
	CHECK_EQ(pen_form_find(PEN_F64, PEN_F32), -1);
	CHECK_EQ(pen_form_bytes(PEN_FORM_BF16_TO_F32, 10), 20);
	CHECK_EQ(pen_form_bytes(PEN_FORM_F32_TO_F16, 12), 6);
	CHECK_EQ(pen_form_bytes(PEN_FORM_PLAIN, 7), 7);
	CHECK_EQ(pen_form_bytes(-1, 7), 7);
	CHECK(!form_of(PEN_FORM_PLAIN) && !form_of(PEN_FORMS) && !form_of(UINT64_MAX));
}

TEST_MAIN
