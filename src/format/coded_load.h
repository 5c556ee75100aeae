/* SPDX-License-Identifier: MIT */
#ifndef FORMAT_CODED_LOAD_H
#define FORMAT_CODED_LOAD_H
/*
 * Loading coded tensors: of each placement the chunks that it needs become an extent, with a coding
 * (base/coding.h) that says what is to be made of them. The engine does the rest.
 */
#include "base/coding.h"
#include "format/model.h"
#include "penstock.h"

struct coded_load;

/* For at most `room` extents. */
int coded_load_new(struct pen_model *model, size_t room, struct coded_load **load,
		   struct pen_error *err);
void coded_load_free(void *load);	/* struct coded_load, or NULL */

/* The tensors that will be added, all of them; then what the file says of their chunks. */
int coded_load_want(struct coded_load *load, const struct pen_tensor *tensor,
		    struct pen_error *err);
int coded_load_read(struct coded_load *load, struct pen_error *err);

/*
 * One extent of a coded tensor, which is not empty. On entry it is what it would be if the tensor
 * were an object of its own that is not coded; on return it is the chunks, as the `number`-th of
 * the load. `form` is what the values become.
 */
int coded_load_add(struct coded_load *load, const struct pen_tensor *tensor,
		   const struct form *form, size_t number, struct pen_extent *extent,
		   struct pen_error *err);

/* For each extent how it is coded, or NULL. */
const struct coding *const *coded_load_codings(const struct coded_load *load);

#endif
