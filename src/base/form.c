/* SPDX-License-Identifier: MIT */
/*
 * The table of forms, and what they are for cores. Compiled for speed (see meson.build): these
 * loops see every byte that is loaded in another dtype to the host.
 */
#include "base/floats.h"
#include "base/form.h"
#include "penstock.h"

#define APPLY(name, From, To) \
	static void name(void *to, const void *from, size_t numbers) \
	{ \
		const From *restrict source = from; \
		To *restrict target = to; \
\
		for (size_t i = 0; i < numbers; i++) \
			target[i] = floats_##name(source[i]); \
	}

APPLY(bf16_to_f16, floats_half, floats_half)
APPLY(bf16_to_f32, floats_half, floats_single)
APPLY(f16_to_bf16, floats_half, floats_half)
APPLY(f16_to_f32, floats_half, floats_single)
APPLY(f32_to_bf16, floats_single, floats_half)
APPLY(f32_to_f16, floats_single, floats_half)

#define FORM(From, To, from_size, to_size, name) \
	{ PEN_##From, PEN_##To, from_size, to_size, "convert_" #name, name }

static const struct form forms[] = {
	[PEN_FORM_BF16_TO_F16] = FORM(BF16, F16, 2, 2, bf16_to_f16),
	[PEN_FORM_BF16_TO_F32] = FORM(BF16, F32, 2, 4, bf16_to_f32),
	[PEN_FORM_F16_TO_BF16] = FORM(F16, BF16, 2, 2, f16_to_bf16),
	[PEN_FORM_F16_TO_F32] = FORM(F16, F32, 2, 4, f16_to_f32),
	[PEN_FORM_F32_TO_BF16] = FORM(F32, BF16, 4, 2, f32_to_bf16),
	[PEN_FORM_F32_TO_F16] = FORM(F32, F16, 4, 2, f32_to_f16),
};

#define FORMS (sizeof(forms) / sizeof(forms[0]))

_Static_assert(FORMS == PEN_FORMS, "every form of the header has its line");

const struct form *form_of(uint64_t number)
{
	return number < FORMS && number != PEN_FORM_PLAIN ? &forms[number] : NULL;
}

uint64_t form_number(const struct form *form)
{
	return (uint64_t)(form - forms);
}

int pen_form_find(int from, int to)
{
	if (from == to)
		return PEN_FORM_PLAIN;
	for (int i = PEN_FORM_PLAIN + 1; i < PEN_FORMS; i++)
		if (forms[i].from == from && forms[i].to == to)
			return i;
	return -1;
}

uint64_t pen_form_bytes(int form, uint64_t length)
{
	return form_bytes(form < 0 ? NULL : form_of((uint64_t)form), length);
}
