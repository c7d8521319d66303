#!/usr/bin/env bash
# Compiles the extension module for aarch64, and runs its tests on two ranks in qemu (Debian 12, root).
#
# The memory order is that of this machine's processor: tests/unit/test_slot_order.py shows that of others. The launcher
# is this machine's. qemu has no process_vm_readv.
set -euo pipefail

folder=$PWD/build/aarch64
torch=2.8.0 # newer wheels for aarch64 on PyPI need CUDA
tests=(tests/mpi/test_{slots,barrier,plain_calls,early_calls,messages}.py)
debian=(libc6 libgcc-s1 libstdc++6 libgfortran5 libgomp1 zlib1g libbz2-1.0 liblzma5 libexpat1 libffi8 libssl3 libuuid1
    libsqlite3-0 libcrypt1 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libpython3.11-dev)
pypi=(numpy mpi4py pytest pytest-mpi rich typing_extensions sympy filelock jinja2 fsspec networkx==3.4.2)
platforms=(manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_5)
wheels=("${platforms[@]/%/_aarch64}")
wheels=(--python-version 3.11 --only-binary=:all: --platform any "${wheels[@]/#/--platform=}")

# 1. Python, torch and MPICH for aarch64
mkdir -p "$folder"/{debs,root,site,mpich}
dpkg --add-architecture arm64
apt-get update -q
apt-get install -y -q qemu-user-static gcc-aarch64-linux-gnu
(cd "$folder/debs" && apt-get download "${debian[@]/%/:arm64}")
for file in "$folder"/debs/*.deb; do dpkg -x "$file" "$folder/root"; done
pip install -q --target "$folder/site" --upgrade "${wheels[@]}" "${pypi[@]}"
pip install -q --target "$folder/site" --upgrade --no-deps "${wheels[@]}" torch==$torch
pip download -q --dest "$folder/mpich" --no-deps "${wheels[@]}" -c constraints.txt mpich
python -m zipfile -e "$folder"/mpich/mpich-*.whl "$folder/mpich"

# 2. the package, in a copy of the checkout
rm -rf "$folder/checkout"
mkdir "$folder/checkout"
git archive HEAD mpicomm tests pyproject.toml | tar -x -C "$folder/checkout"
cd "$folder/checkout"
crc=$(python -c "import pathlib, mpicomm.native.extension as e; print(e.source_crc(pathlib.Path('mpicomm/native')))")
aarch64-linux-gnu-gcc -shared -fPIC -std=c11 -O3 -Wall -Wextra -Werror -ffp-contract=off -fvisibility=hidden \
    "-DSOURCE_CRC=${crc}u" "-I$folder/root/usr/include/python3.11" "-I$folder/root/usr/include" mpicomm/native/*.c \
    -o mpicomm/native/hot_path.abi3.so

# 3. the tests
cat > "$folder/python" <<END
#!/bin/sh
exec qemu-aarch64-static -L $folder/root -E LD_LIBRARY_PATH=$(echo "$folder"/mpich/*.data/data/lib) \
    $folder/root/usr/bin/python3.11 "\$@"
END
chmod +x "$folder/python"
export PYTHONPATH=$PWD:$folder/site OMP_NUM_THREADS=1 MPIR_CVAR_CH4_CMA_ENABLE=0
mpiexec -n 2 "$folder/python" -m pytest -p mpicomm.testing.pytest_plugin --with-mpi -q "${tests[@]}"
"$folder/python" -m pytest -p mpicomm.testing.pytest_plugin -q tests/unit/test_native.py
