/* SPDX-License-Identifier: MIT */
#ifndef CLI_COMMANDS_H
#define CLI_COMMANDS_H
/* The commands, each in the file of its name, and how they end. */
#include "options.h"

enum { STATUS_OK = 0, STATUS_FAILURE = 1, STATUS_USAGE = 2 };

extern const struct command command_ckpt, command_completion, command_copy, command_explain,
	command_inspect, command_load, command_make_model, command_pack, command_unpack,
	command_verify;

/* All of them, as help lists them; ends with NULL. */
extern const struct command *const commands[];

#endif
