# SPDX-License-Identifier: MIT
# To be read by scripts: cuFile asks udev what is on a disk, and containers have no such record.
#
#   make_udev_record FOLDER    as root: the record of the folder's disk, unless there is one
#   remove_udev_record         what was made, and nothing else
udev_record= udev_made=

make_udev_record() {
	number=$(stat -c %d "$1")
	record=/run/udev/data/b$((number >> 8 & 0xfff)):$((number & 0xff | number >> 12 & 0xfff00))
	[ ! -e "$record" ] || return 0
	for folder in /run/udev /run/udev/data; do
		[ -d $folder ] || { mkdir $folder && udev_made="$folder $udev_made"; }
	done
	type=$(df -PT "$1" | awk 'NR == 2 { print $2 }')
	printf 'E:ID_FS_USAGE=filesystem\nE:ID_FS_TYPE=%s\n' "$type" >"$record"
	udev_record=$record
	echo "made $record for cuFile; it is removed at the end"
}

remove_udev_record() {
	[ -z "$udev_record" ] || rm -f "$udev_record"
	for folder in $udev_made; do
		rmdir "$folder" 2>/dev/null || :
	done
}
