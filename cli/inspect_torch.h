/* SPDX-License-Identifier: MIT */
#ifndef CLI_INSPECT_TORCH_H
#define CLI_INSPECT_TORCH_H
/* What penstock inspect says of a file that torch.save wrote. */
#include <stdbool.h>
#include "options.h"

/* Does it begin as such files do? What cannot be read does not; who opens it says why. */
bool inspect_is_torch(const char *path);

/* List its records and tensors; returns the status of the command. */
int inspect_torch(const char *path, const struct option_list *keys, bool json);

/* What a file has to verify it by, in a word: "digests", "crc32", "nothing". */
const char *inspect_torch_by(int by);

#endif
